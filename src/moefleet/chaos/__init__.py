"""Break a Fleet on purpose, and check every row that it delivers meanwhile.

``plan.py`` what is done to which rank; ``work.py`` the steps whose right answer is known; ``rank.py`` a rank's process;
``crew.py`` the ranks, forked from a warm process, as the supervisor sees them; ``supervisor.py`` one round: inject,
agree, recover; ``report.py`` what was seen; ``rounds.py`` many random rounds; ``show.py``, ``plot.py``.
"""

from .plan import Fault, Kind, Plan, Recovery, random_plan
from .report import RoundReport
from .rounds import run_rounds
from .supervisor import run_round

__all__ = ["Fault", "Kind", "Plan", "Recovery", "RoundReport", "random_plan", "run_round", "run_rounds"]
