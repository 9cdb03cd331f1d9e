"""Hugging Face transformers: a model's experts spread over ranks, through transformers' own experts registry.

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with expert_parallel(model, BootstrapConfig.from_env(), max_tokens_per_rank=512):
        model.generate(...)                # every rank its own batch, all ranks the same number of forwards

``experts.py`` finds the experts of a model and takes a rank's share, ``parallel.py`` runs them over a Fleet,
``greedy.py`` generates on all ranks in lockstep.
"""

from ...errors import MoEEpNotBuiltError

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as _  # noqa: F401 - whether it is there
except ImportError as error:
    raise MoEEpNotBuiltError(
        f"moefleet.integrations.transformers needs transformers 5 or newer with its experts registry: {error}; "
        "pip install 'moefleet[transformers]'"
    ) from error

from .greedy import Continuation, greedy, greedy_in_lockstep
from .parallel import EXPERTS_FUNCTION, ExpertParallel, expert_parallel

__all__ = [
    "EXPERTS_FUNCTION",
    "Continuation",
    "ExpertParallel",
    "expert_parallel",
    "greedy",
    "greedy_in_lockstep",
]
