"""What one rank of the demo does."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..config import BootstrapConfig
from .beacon import Beacon
from .job import Job, RankReport
from .model import load_model

if TYPE_CHECKING:
    from ..integrations.transformers import ExpertParallel


def continue_prompts(bootstrap: BootstrapConfig, job: Job) -> RankReport:
    """Load the model, keep this rank's experts, and continue this rank's prompts together with all others."""
    from ..integrations.transformers import expert_parallel, greedy_in_lockstep

    model = load_model(job.model)
    spread = expert_parallel(
        model,
        replace(bootstrap, device="cpu", timeout_s=job.timeout_s),
        max_tokens_per_rank=max(map(len, job.prompts)),
        layout=job.layout,
        backend=job.transport,
    )
    with spread as parallel, closing(Beacon(parallel.rank, job.beacon_port)) as beacon:
        parallel.idle_step()  # returns when all ranks are here
        pairs = count_pairs(parallel)
        beacon.step()
        start = time.perf_counter()
        continuations = greedy_in_lockstep(parallel, job.prompts, job.max_new_tokens, on_step=beacon.step)
        seconds = time.perf_counter() - start
        fleet = parallel.fleet
        return RankReport(
            continuations,
            seconds,
            pairs.tolist(),
            fleet.placement.experts_of(parallel.rank),
            expert_bytes(parallel),
            fleet.name,
        )


def count_pairs(parallel: ExpertParallel) -> torch.Tensor:
    """int64 ``[E]`` that counts from now on: the (token, expert) pairs which this rank's tokens bring, all blocks."""
    pairs = torch.zeros(parallel.fleet.params.num_experts, dtype=torch.int64)

    def count(_: Any, args: tuple[Any, ...]) -> None:
        pairs.add_(torch.bincount(args[0].topk_ids.flatten(), minlength=len(pairs)))

    for layer in parallel.layers.values():
        layer.register_forward_pre_hook(count)
    return pairs


def expert_bytes(parallel: ExpertParallel) -> int:
    """Memory of the expert weights that this rank keeps."""
    packs = [layer.weights for layer in parallel.layers.values()]
    return sum(plane.untyped_storage().nbytes() for pack in packs if pack is not None for plane in (pack.w13, pack.w2))
