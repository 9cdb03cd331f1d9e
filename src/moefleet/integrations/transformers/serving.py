"""Forwards of different number and length on different ranks, over steps that all ranks take together.

At the start of each forward (in its first block) a rank announces in how many pieces of ``M`` tokens it has to cut its
own; every rank then cuts every block of that forward into the largest number that was announced. A rank that has no
forward left announces 0 and takes part without tokens, until all ranks announce 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

import torch

from ...errors import MoEEpError, config_error
from ...knobs import HandleAlgoKnobTopKWeights
from ...layer import Fleet, MoEEpLayer
from ...tensors import DispatchInputParams, HandleParams, MoEEpTensors
from .announce import Announcements


class Serving:
    """What runs the blocks between the beginning and the end of ``with ExpertParallel.serving()``.

    Leaving it without an error waits for all ranks to leave, and takes part in their forwards meanwhile. Leaving it
    with one tells the peers at once: they raise MoEEpPeerError.

    Args:
        layers: the MoE layer of each block, in the order of a forward.
        nothing: a step's inputs without tokens.
    """

    def __init__(self, layers: Sequence[MoEEpLayer], nothing: MoEEpTensors) -> None:
        self._layers, self._nothing = layers, nothing
        self._fleet = layers[0].fleet
        self._most = self._fleet.params.max_tokens_per_rank
        self._alone = self._fleet.bootstrap.world_size == 1
        topk, dtype = nothing.topk_ids.shape[1], nothing.hidden_states.dtype
        self._announcements = Announcements(self._fleet, topk, dtype)
        self._next = self._pieces = 0
        self._failed = False

    def forward(self, block: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """One block of a forward, ``[T, H]`` for any ``T``.

        Raises:
            MoEEpConfigError: not the block whose turn it is: a forward was broken off, or this serving has failed.
            MoEEpError: see :meth:`moefleet.MoEEpLayer.forward`.
        """
        mine = max(1, -(-len(hidden) // self._most))
        self._check(block, mine)
        try:
            if block == 0:
                self._pieces = mine if self._alone else self._announcements.largest(mine)
            result = self._in_pieces(self._layers[block], hidden, ids, weights)
        except BaseException:
            self._failed = True
            raise
        self._next = (block + 1) % len(self._layers)
        return result

    def finish(self) -> None:
        """Take part in the forwards of the other ranks until none has any left."""
        if self._alone:
            return
        self._check(0, 1)
        try:
            while pieces := self._announcements.largest(0):
                for layer in self._layers:
                    for _ in range(pieces):
                        layer(self._nothing)
        except BaseException:
            self._failed = True
            raise

    def give_up(self, error: BaseException) -> None:
        """Tell the peers, unless they know: the step that all are about to begin fails for all."""
        if not self._failed and not self._alone:
            self._failed = True
            with suppress(MoEEpError):
                fail_next_step(self._fleet, error, self._nothing)

    def _check(self, block: int, pieces: int) -> None:
        if self._failed:
            raise config_error("serving", "a forward after one that failed", "none", "leave it and enter another")
        if block != self._next or (block and pieces > self._pieces):
            raise config_error(
                "serving",
                f"block {block} where block {self._next} of a forward is due",
                "whole forwards with the same tokens in every block",
                "do not go on after a forward that raised: leave it and enter another",
            )

    def _in_pieces(
        self, layer: MoEEpLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        if self._pieces == 1:
            whole: torch.Tensor = layer(MoEEpTensors(hidden, ids, weights))
            return whole
        result = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        for piece in range(self._pieces):
            at = slice(piece * self._most, (piece + 1) * self._most)
            layer(MoEEpTensors(hidden[at], ids[at], weights[at], output=result[at]))
        return result

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if value is not None:
            self.give_up(value)
            return
        try:
            self.finish()
        except BaseException as error:
            self.give_up(error)
            raise


def fail_next_step(fleet: Fleet, error: BaseException, nothing: MoEEpTensors) -> None:
    """Give up the step that this rank would begin next, and tell the peers, without waiting for them."""
    steps = getattr(fleet, "steps", None)
    if steps is not None and hasattr(steps, "fail_next"):
        steps.fail_next(error)
        return
    handle = fleet.create_handle(HandleParams(nothing.topk_ids), [HandleAlgoKnobTopKWeights(nothing.topk_weights)])
    handle.dispatch_send_only(DispatchInputParams([nothing.hidden_states]))
    handle.destroy()
