"""The parent's side of the suite: run a function on ranks, over one transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import pytest
import torch

from moefleet import EpLayout, FleetParams, MoEEpTimeoutError
from moefleet.knobs import FP8E4M3
from moefleet.launch import RankPool, RankResult
from tests import time_limit
from tests.conformance.context import enter
from tests.conformance.pool import MOST_RANKS
from tests.conformance.transports import PROMISES, Transport
from tests.strategies import Problem, make_problem

RESERVE_S = 15.0
"""Of a test's time, for starting the ranks that the test before cost, and for ending those that hang."""


class Ranks:
    """``ranks(fn, ...)`` runs ``fn(context, ...)`` on ranks and returns every rank's value.

    Args:
        carried: names of the transports that carried something; a successful call adds this one's.
        most: how many ranks there can be.

    Attributes:
        world: how many a test has that does not say.
    """

    def __init__(
        self, pool: RankPool, transport: Transport, device: str, carried: set[str], most: int = MOST_RANKS
    ) -> None:
        self.transport, self.device, self.most, self.world = transport, device, most, min(3, most)
        self._pool, self._carried = pool, carried

    def __call__(
        self, fn: Callable[..., Any], *args: Any, world: int | None = None, timeout_s: float = 90.0
    ) -> list[Any]:
        """Raises AssertionError with every rank's error if a rank raised."""
        results = self.outcomes(fn, *args, world=world, timeout_s=timeout_s)
        if any(result.error is not None for result in results):
            fail(results)
        self._carried.add(self.transport.name)
        return [result.value for result in results]

    def outcomes(
        self, fn: Callable[..., Any], *args: Any, world: int | None = None, timeout_s: float = 90.0
    ) -> list[RankResult]:
        """As a call, with every rank's error as a value. Raises AssertionError with where they stood if ranks hang.

        Hanging ranks are ended after ``timeout_s``, twice as much on a GPU, or when the test's own time is nearly over:
        pytest would end the test without a word of theirs.
        """
        world = self.world if world is None else world
        self.require_ranks(world)
        call = (fn, self.transport.name, self.device, args)
        if self.device != "cpu":
            timeout_s *= 2  # kernels are compiled for each size
        timeout_s = min(timeout_s, max(1.0, round(time_limit.left_s() - RESERVE_S, 1)))
        results = self._pool.run(enter, *call, world_size=world, timeout_s=timeout_s)
        if any(isinstance(result.error, MoEEpTimeoutError) and result.exitcode != 1 for result in results):
            fail(results)  # 1: it was not ended, but raised such an error itself
        return results

    # What the transport can do.

    def require_ranks(self, least: int) -> None:
        """Skip the test where there cannot be so many ranks."""
        if least > self.most:
            why = "" if self.device == "cpu" else f" ({torch.cuda.device_count()} GPUs, and one rank on each)"
            pytest.skip(f"needs {least} ranks; {self.transport.name} has at most {self.most} here{why}")

    def require(self, promise: str) -> None:
        """Skip the test unless the transport promises this."""
        if not self.transport.has(promise):
            pytest.skip(f"{self.transport.name} does not promise {promise!r}: {PROMISES[promise]}")

    def require_quantisation(self) -> None:
        """Skip the test unless the transport makes fp8 rows of tokens."""
        limits = self.transport.limits
        if limits is None or FP8E4M3 not in limits.quants:
            pytest.skip(f"{self.transport.name} does not quantise rows")

    def require_fit(self, params: FleetParams, world: int) -> FleetParams:
        """Skip the test where the transport's limits refuse these parameters."""
        if reason := self.transport.why_not(params, world, self.device):
            pytest.skip(reason)
        return params

    def fits(self, params: FleetParams, world: int) -> bool:
        return not self.transport.why_not(params, world, self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The row type of most tests: float32 where it can be carried."""
        limits = self.transport.limits
        return torch.float32 if limits is None or 4 in limits.dtype_bytes else torch.bfloat16

    def hidden(self, least: int = 4) -> int:
        """The smallest hidden size from ``least`` on that the transport carries."""
        limits = self.transport.limits
        if limits is None:
            return least
        if limits.hidden_sizes is not None:
            return min((size for size in limits.hidden_sizes if size >= least), default=least)
        return -(-least // limits.hidden_multiple) * limits.hidden_multiple

    def experts(self, least: int, world: int) -> int:
        """The smallest number of experts from ``least`` on that it can spread over ``world`` ranks."""
        limits = self.transport.limits
        return -(-least // world) * world if limits is not None and limits.experts_divisible else least

    def problem(
        self,
        tokens: Sequence[int],
        *,
        seed: int = 0,
        experts: int = 5,
        topk: int = 3,
        hidden: int = 4,
        dtype: torch.dtype | None = None,
        special: str = "random",
    ) -> Problem:
        """A step that the transport's limits allow, with the expert and hidden sizes nearest to those asked for, and
        of as many ranks as there can be: at least two, where more than one was asked for."""
        self.require_ranks(min(2, len(tokens)))
        tokens = tokens[: self.most]
        world = len(tokens)
        sizes = (self.experts(experts, world), self.hidden(hidden), topk)
        return make_problem(seed, world, *sizes, tokens, dtype or self.dtype, special)

    def params(self, problem: Problem, layout: EpLayout, **changes: Any) -> FleetParams:
        """The smallest Fleet for a problem; skips the test if the limits refuse it."""
        return self.require_fit(problem.params(layout, **changes), problem.world_size)


def fail(results: Sequence[RankResult]) -> NoReturn:
    """Raise every rank's error in one AssertionError."""
    failed = [result for result in results if result.error is not None]
    told = "\n".join(f"rank {r.rank}: {type(r.error).__name__}: {r.error}" for r in failed)
    raise AssertionError(told) from failed[0].error
