"""What a model takes on ``W`` ranks, computed before anything runs: weights, Fleet memory, bytes that cross.

    model, checkpoint = read_model(path), read_checkpoint(path, experts, layers)
    plan = make_plan(model, world, look(), checkpoint=checkpoint)

``configs.py`` reads a model's config, ``checkpoint.py`` the headers of its weights, ``dense.py`` estimates what is not
experts; ``memory.py`` and ``traffic.py`` hold the formulas, ``advice.py`` proposes sizes, ``fit.py`` judges transports.
"""

from .checkpoint import Checkpoint, read_checkpoint
from .configs import read_model
from .fit import Fit
from .memory import Memory
from .planning import LayoutPlan, Plan, RankShare, make_plan
from .shape import ModelShape
from .surroundings import Surroundings, look
from .traffic import Traffic

__all__ = [
    "Checkpoint",
    "Fit",
    "LayoutPlan",
    "Memory",
    "ModelShape",
    "Plan",
    "RankShare",
    "Surroundings",
    "Traffic",
    "look",
    "make_plan",
    "read_checkpoint",
    "read_model",
]
