"""The same texts by the unmodified model in one process, each prompt a batch of its own as on its rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .job import Job
from .model import load_model

if TYPE_CHECKING:
    from ..integrations.transformers import Continuation


def continue_alone(job: Job, on_step: Callable[[int], None]) -> list[Continuation]:
    """Continue all prompts without moefleet: transformers' own experts.

    Args:
        job: as for the ranks.
        on_step: called after each forward with the number of those done.
    """
    from ..integrations.transformers import greedy

    done = itertools.count(1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for so small a model
    try:
        model = load_model(job.model)
        return [
            greedy(model, prompt, job.max_new_tokens, on_step=lambda: on_step(next(done))) for prompt in job.prompts
        ]
    finally:
        torch.set_num_threads(threads)
