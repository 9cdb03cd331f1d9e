"""Hugging Face transformers: a model's experts spread over ranks, through transformers' own experts registry.

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with expert_parallel(model, BootstrapConfig.from_env(), max_tokens_per_rank=512) as parallel:
        with parallel.serving():
            model.generate(...)            # every rank its own prompts, as many and as long as it likes

``experts.py`` finds the experts of a model and takes a rank's share, ``gates.py`` tells what they compute,
``parallel.py`` runs them over a Fleet, ``serving.py`` lets ranks differ in what they have to do (``announce.py`` is how
they know), ``checkpoint.py`` loads a rank's share from files, ``memory.py`` says what that takes, ``greedy.py``
generates on all ranks in lockstep, ``version.py`` says which transformers is needed.
"""

from .version import require_transformers

require_transformers()

from .greedy import Continuation, greedy, greedy_in_lockstep  # noqa: E402 - what it needs is said first
from .memory import Memory, predict_memory  # noqa: E402
from .parallel import EXPERTS_FUNCTION, ExpertParallel, expert_parallel  # noqa: E402

__all__ = [
    "EXPERTS_FUNCTION",
    "Continuation",
    "ExpertParallel",
    "Memory",
    "expert_parallel",
    "greedy",
    "greedy_in_lockstep",
    "predict_memory",
]
