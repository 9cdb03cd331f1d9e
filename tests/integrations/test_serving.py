"""Inside serving() ranks differ in what they have to do, and a rank that fails takes nobody's time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from moefleet.config import BootstrapConfig, EpLayout
from moefleet.errors import MoEEpConfigError, MoEEpError, MoEEpPeerError
from moefleet.integrations.transformers import ExpertParallel, expert_parallel
from tests.conformance.pool import shared_pool
from tests.integrations.families import V, tiny

M = 4
PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12, 13], [5], [40, 41, 42, 43, 44, 45]]
LENGTHS = [5, 2, 9, 3]
"""New tokens of each prompt."""


def run(fn: Any, *args: Any, world_size: int) -> list[Any]:
    return shared_pool().run(fn, *args, world_size=world_size, timeout_s=100)


def values(fn: Any, *args: Any, world_size: int) -> list[Any]:
    results = run(fn, *args, world_size=world_size)
    for result in results:
        if result.error is not None:
            raise result.error
    return [result.value for result in results]


def continued(model: Any, number: int, **options: Any) -> list[int]:
    prompt = torch.tensor([PROMPTS[number]])
    text = model.generate(prompt, max_new_tokens=LENGTHS[number], do_sample=False, **options)
    return text[0, prompt.shape[1] :].tolist()


def spread(bootstrap: BootstrapConfig, family: str = "qwen3_moe", **options: Any) -> ExpertParallel:
    topk = options.pop("topk", 2)
    return expert_parallel(tiny(family, topk=topk), bootstrap, max_tokens_per_rank=M, **options)


# Ranks with different work.


def share(
    bootstrap: BootstrapConfig, prompts: int, layout: EpLayout, topk: int, backend: str
) -> tuple[dict[int, list[int]], int]:
    """What this rank writes of the prompts that are its own, and the steps that it took part in."""
    with spread(bootstrap, layout=layout, topk=topk, backend=backend) as parallel:
        mine = range(bootstrap.rank, prompts, bootstrap.world_size)
        with parallel.serving():
            texts = {number: continued(parallel.model, number) for number in mine}
        with parallel.serving():  # again, with nothing to do
            pass
        return texts, parallel.fleet.stats()["steps"]


@pytest.mark.parametrize(
    ("world_size", "prompts", "layout", "topk", "backend"),
    [
        (4, 3, EpLayout.EXPERT_MAJOR, 2, "shm"),
        (2, 4, EpLayout.RANK_MAJOR, 2, "shm"),
        (3, 1, EpLayout.FLAT, 2, "shm"),
        (2, 3, EpLayout.EXPERT_MAJOR, 1, "shm"),
        (3, 2, EpLayout.EXPERT_MAJOR, 2, "torch_dist"),
        (1, 2, EpLayout.EXPERT_MAJOR, 2, "auto"),
    ],
)
def test_ranks_generate_what_one_process_does(
    world_size: int, prompts: int, layout: EpLayout, topk: int, backend: str
) -> None:
    model = tiny("qwen3_moe", topk=topk)
    expected = {number: continued(model, number) for number in range(prompts)}
    together: dict[int, list[int]] = {}
    got = values(share, prompts, layout, topk, backend, world_size=world_size)
    for texts, _ in got:
        together |= texts
    assert together == expected
    assert len({steps for _, steps in got}) == 1, "all ranks took part in the same steps"


def test_a_forward_costs_one_more_step() -> None:
    """Two ranks, one prompt of M tokens or less on each: blocks and one announcement per forward, one in the end."""
    ((_, steps), _) = values(share_short, world_size=2)
    assert steps == 5 * (2 + 1) + 1


def share_short(bootstrap: BootstrapConfig) -> tuple[list[int], int]:
    with spread(bootstrap) as parallel:
        with parallel.serving():
            text = continued(parallel.model, 0) if bootstrap.rank == 0 else []
        return text, parallel.fleet.stats()["steps"]


def batch(bootstrap: BootstrapConfig) -> tuple[list[list[int]], list[list[int]]]:
    """A left-padded batch of three prompts on rank 0, sampling on rank 1; both as one process does them."""
    ids, mask = torch.zeros(3, 6, dtype=torch.int64), torch.zeros(3, 6, dtype=torch.int64)
    for row, prompt in enumerate((PROMPTS[0], PROMPTS[2], PROMPTS[3])):
        ids[row, -len(prompt) :] = torch.tensor(prompt)
        mask[row, -len(prompt) :] = 1
    options: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=4, do_sample=bootstrap.rank == 1)
    whole = tiny("qwen3_moe")
    torch.manual_seed(7)
    expected = whole.generate(ids, **options)
    with spread(bootstrap) as parallel, parallel.serving():
        torch.manual_seed(7)
        got = parallel.model.generate(ids, **options)
    return got.tolist(), expected.tolist()


def test_batches_and_sampling() -> None:
    for got, expected in values(batch, world_size=2):
        assert got == expected


# Ranks that fail.


def fail(bootstrap: BootstrapConfig, where: str, backend: str) -> tuple[str, str, float, list[int]]:
    """What ends serving() here when rank 1 raises, after how long, and what is generated together afterwards."""
    start = time.monotonic()
    with spread(replace(bootstrap, timeout_s=60.0), backend=backend) as parallel:
        try:
            with parallel.serving():
                if bootstrap.rank == 1:
                    if where == "in a forward":
                        parallel.model.model.layers[1].self_attn.register_forward_hook(broken)
                    if where != "at once":
                        continued(parallel.model, 0)
                    raise ArithmeticError("no luck")
                if bootstrap.rank == 0:
                    continued(parallel.model, 2)
        except (ArithmeticError, MoEEpError) as error:
            kind, said = type(error).__name__, str(error)
        took = time.monotonic() - start
        parallel.model.model.layers[1].self_attn._forward_hooks.clear()
        with parallel.serving():
            return kind, said, took, continued(parallel.model, bootstrap.rank)


def broken(*_: Any) -> None:
    raise ArithmeticError("no luck")


@pytest.mark.parametrize(
    ("where", "backend"),
    [("at once", "shm"), ("in a forward", "shm"), ("between forwards", "shm"), ("in a forward", "torch_dist")],
)
def test_peers_of_a_rank_that_raises_learn_it_at_once_and_the_next_serving_works(where: str, backend: str) -> None:
    model = tiny("qwen3_moe")
    for rank, (kind, said, took, text) in enumerate(values(fail, where, backend, world_size=3)):
        assert kind == ("ArithmeticError" if rank == 1 else MoEEpPeerError.__name__), said
        assert "no luck" in said and (rank == 1 or "rank 1" in said)
        assert took < 60, "the time-out"
        assert text == continued(model, rank)


def die(bootstrap: BootstrapConfig) -> str:
    import os

    with spread(bootstrap) as parallel:
        try:
            with parallel.serving():
                if bootstrap.rank == 1:
                    os._exit(3)
                continued(parallel.model, 2)
        except MoEEpPeerError as error:
            return str(error)
    return "nothing"


def test_a_rank_that_dies_is_named() -> None:
    survivor, dead = run(die, world_size=2)
    assert survivor.error is None and "rank 1" in survivor.value
    assert dead.error is not None


# Mistakes, one rank in this process.


@torch.no_grad()
def test_mistakes_are_named() -> None:
    with spread(BootstrapConfig(1, 0, device="cpu")) as parallel:
        ids = torch.randint(V, (1, 3))
        with parallel.serving():
            with pytest.raises(MoEEpConfigError, match="serving: got an entry while it is entered"):
                with parallel.serving():
                    pass
            with pytest.raises(MoEEpConfigError, match=r"idle_step: got a call inside serving"):
                parallel.idle_step()
            hook = parallel.model.model.layers[1].self_attn.register_forward_hook(broken)
            with pytest.raises(ArithmeticError):
                parallel.model(ids)
            hook.remove()
            with pytest.raises(MoEEpConfigError, match=r"serving: got block 0 where block 1 .* do not go on after"):
                parallel.model(ids)
        with parallel.serving():
            parallel.model(ids)
    with pytest.raises(MoEEpError, match="was destroyed"):
        with parallel.serving():
            pass
