"""What one rank does: load its share, write its own prompts, help with the others'."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import astuple, replace
from typing import Any

import torch

from ..config import BootstrapConfig
from ..launch.devices import take_device
from .job import Job, RankReport
from .stream import Sender


def write_prompts(bootstrap: BootstrapConfig, job: Job) -> RankReport:
    """Continue this rank's prompts, each a batch of its own."""
    from ..integrations.transformers import expert_parallel, predict_memory

    start = time.perf_counter()
    bootstrap = replace(take_device(bootstrap, job.device), timeout_s=job.timeout_s)
    dtype = None if job.dtype == "auto" else getattr(torch, job.dtype)
    options: dict[str, Any] = dict(max_tokens_per_rank=job.max_tokens_per_rank, layout=job.layout, dtype=dtype)
    # First of all: from here on, the others learn at once where this rank fails.
    spread = expert_parallel(job.model, bootstrap, backend=job.transport, **options)
    with spread as parallel, closing(Sender(job.port, job.secret)) as sender:
        loaded = time.perf_counter()
        predicted = predict_memory(job.model, bootstrap.world_size, bootstrap.rank, device=bootstrap.device, **options)
        with parallel.serving():
            mine = range(parallel.rank, len(job.prompts), parallel.world_size)
            texts = {number: written(parallel.model, number, job, sender) for number in mine}
        return RankReport(
            texts,
            loaded - start,
            time.perf_counter() - loaded,
            parallel.fleet.placement.experts_of(parallel.rank),
            astuple(predicted),
            astuple(parallel.memory()),
            parallel.fleet.name,
        )


def written(model: Any, number: int, job: Job, sender: Sender) -> list[int]:
    """New tokens of one prompt, sent on one by one."""
    from transformers.generation.streamers import BaseStreamer

    class Streamer(BaseStreamer):  # type: ignore[misc, unused-ignore]
        """What ``generate`` gives each new token to, and before them the prompt."""

        def __init__(self) -> None:
            self.started = False

        def put(self, value: torch.Tensor) -> None:
            if self.started:
                sender.tokens(number, value.flatten().tolist())
            self.started = True

        def end(self) -> None:
            sender.tokens(number, [], last=True)

    ids = torch.tensor([job.prompts[number]], device=model.device)
    sampling = job.sampling
    options: dict[str, Any] = dict(do_sample=False, temperature=None, top_p=None, top_k=None)
    if sampling.temperature > 0:
        options = dict(do_sample=True, temperature=sampling.temperature, top_p=sampling.top_p, top_k=0)
    if getattr(model.generation_config, "pad_token_id", None) is None:
        options["pad_token_id"] = 0  # for batches only: there is none here
    torch.manual_seed(sampling.seed + number)
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=job.max_new_tokens,
        streamer=Streamer(),
        **options,
    )
    new: list[int] = whole[0, ids.shape[1] :].tolist()
    return new
