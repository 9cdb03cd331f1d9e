"""Greedy generation with a KV cache, by one process or by all ranks in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .parallel import ExpertParallel

CACHE_NAMES = ("cache", "past_key_values")
"""What transformers calls the KV cache in a model's arguments and in its output: newer versions first."""


@dataclass(frozen=True)
class Continuation:
    """What follows a prompt.

    Attributes:
        tokens: ``N`` new tokens, the end-of-text token treated like any other.
        logits: float32 ``[N, V]`` on the CPU; ``tokens[n]`` is the largest entry of row ``n``.
    """

    tokens: list[int]
    logits: torch.Tensor


@torch.no_grad()
def greedy(
    model: nn.Module,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    on_step: Callable[[], None] | None = None,
) -> Continuation:
    """Continue one prompt, a batch of its own, by exactly ``max_new_tokens`` tokens: as many forwards of the model.

    Args:
        model: any causal language model of transformers, its experts spread over ranks or not.
        prompt: at least one token id.
        max_new_tokens: ``N``, at least 1.
        on_step: called after each forward.
    """
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    cache: dict[str, Any] = {}
    rows = []
    for _ in range(max_new_tokens):
        output = model(input_ids=ids, use_cache=True, **cache)
        cache = cache_of(output)
        row = output.logits[0, -1]
        ids = row.argmax().reshape(1, 1)
        rows.append(row.float().cpu())
        if on_step is not None:
            on_step()
    logits = torch.stack(rows)
    return Continuation(logits.argmax(-1).tolist(), logits)


def cache_of(output: Any) -> dict[str, Any]:
    """What the next forward gets of this one's output: the KV cache, under this transformers' name for it."""
    return next({name: output[name]} for name in CACHE_NAMES if name in output)


def greedy_in_lockstep(
    parallel: ExpertParallel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    on_step: Callable[[], None] | None = None,
) -> dict[int, Continuation]:
    """Continue all prompts, each by exactly ``max_new_tokens`` tokens. All ranks call it with the same arguments.

    Prompt ``p`` is rank ``p % W``'s. A rank with several takes them one after another, and one that has none left
    takes part without tokens, so that every rank runs ``ceil(len(prompts) / W) * max_new_tokens`` forwards.

    Args:
        parallel: the model with its spread experts; ``M`` must be at least the length of the longest prompt.
        prompts, max_new_tokens, on_step: as for :func:`greedy`.

    Returns:
        This rank's continuations, by the prompt's number.
    """
    done: dict[int, Continuation] = {}
    for first in range(0, len(prompts), parallel.world_size):
        number = first + parallel.rank
        if number < len(prompts):
            done[number] = greedy(parallel.model, prompts[number], max_new_tokens, on_step=on_step)
            continue
        for _ in range(max_new_tokens):
            parallel.idle_step()
            if on_step is not None:
                on_step()
    return done
