"""A model's experts over a Fleet: each rank keeps its share and computes it for all ranks' tokens."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ...config import BootstrapConfig, CommConfig, EpLayout, SplitConfig
from ...errors import MoEEpError, config_error
from ...knobs import FleetAlgoKnob
from ...layer import Fleet, Meeting, MoEEpLayer, create_fleet
from ...tensors import MoEEpTensors
from .checkpoint import load_share, refuse_quantised
from .experts import Experts, find_experts
from .memory import Memory, fleet_params, measured
from .serving import Serving

EXPERTS_FUNCTION = "moefleet"
"""Name of :func:`experts_forward` in transformers' ``ALL_EXPERTS_FUNCTIONS``."""

LAYER = "moefleet_layer"
"""Where an experts module keeps its :class:`~moefleet.MoEEpLayer`."""

SEAT = "moefleet_seat"
"""Where an experts module keeps its :class:`Seat`."""


def expert_parallel(
    model: nn.Module | str | os.PathLike[str],
    bootstrap: BootstrapConfig,
    *,
    max_tokens_per_rank: int,
    layout: EpLayout | None = None,
    backend: str | CommConfig = "auto",
    fleet_knobs: Sequence[FleetAlgoKnob] = (),
    topk: int | None = None,
    dtype: torch.dtype | None = None,
) -> ExpertParallel:
    """Spread the experts of all MoE blocks of ``model`` over the ranks. Blocks until all ranks have called it.

    A model is changed in place: of each block's experts this rank keeps its own, the others are freed; attention,
    routers and shared experts stay as they are, whole on every rank. Of a checkpoint directory, other ranks' experts
    are not even read. All blocks share one Fleet. From then on the model's forward is a collective: see
    :class:`ExpertParallel`. For inference only, no gradient passes the experts.

    Args:
        model: a transformers model with its weights loaded, the same on all ranks, or the directory of a checkpoint in
            safetensors files, which becomes ``result.model``.
        bootstrap: this rank and its group. ``device=None`` means the device of the experts; from a directory the
            current accelerator, or the CPU.
        max_tokens_per_rank: ``M``, the most tokens (batch times sequence) of one step on one rank. A forward may have
            more inside :meth:`ExpertParallel.serving`, which takes several steps then.
        layout: ``None`` takes FLAT on a CPU, where it was measured to be the fastest also for few tokens, and
            EXPERT_MAJOR elsewhere.
        backend: ``"auto"``, a transport's name, or its config.
        fleet_knobs: options of the Fleet.
        topk: ``K``, experts per token; ``None`` reads ``num_experts_per_tok`` from the model's config.
        dtype: of the weights, from a directory; ``None`` for that of the checkpoint.

    Raises:
        MoEEpConfigError: experts that moefleet cannot compute, quantised weights, or a bad value.
        MoEEpPeerError: another rank failed meanwhile, with its reason, or its process ended.
        MoEEpError: see :func:`moefleet.create_fleet`. Until here the model is unchanged.
    """
    # Before the weights are read: the peers learn at once if this rank does not get through.
    meeting = Meeting(bootstrap)
    with meeting.announcing():
        loaded, tensors_read = _loaded(model, bootstrap, dtype)
        blocks = find_experts(loaded)
        num_experts, hidden, rows, device = blocks[0].form
        topk = _topk(blocks[0], topk)
        most_topk = max(topk, 2)  # announcements may need two
        params = fleet_params(num_experts, max_tokens_per_rank, hidden, rows, layout, device, most_topk)
        bootstrap = replace(bootstrap, device=_device(bootstrap, device))
        fleet = create_fleet(bootstrap, params, fleet_knobs, backend, meeting=meeting)

    layers: dict[str, MoEEpLayer] = {}
    try:
        own = fleet.placement.experts_of(bootstrap.rank)
        for block in blocks:
            split = SplitConfig(backend, block.gate)
            layers[block.name] = MoEEpLayer(bootstrap, params, block.take_share(own), (), split, fleet=fleet)
    except BaseException:
        fleet.destroy()
        raise
    parallel = ExpertParallel(loaded, layers, topk, rows, tensors_read)
    for number, block in enumerate(blocks):
        _attach(block.module, layers[block.name], Seat(parallel, number))
    return parallel


def _loaded(
    model: nn.Module | str | os.PathLike[str], bootstrap: BootstrapConfig, dtype: torch.dtype | None
) -> tuple[nn.Module, tuple[str, ...]]:
    """The model, and the names of the tensors that were read for it."""
    loaded: nn.Module
    tensors_read: tuple[str, ...] = ()
    if isinstance(model, (str, os.PathLike)):
        loaded, tensors_read = load_share(model, bootstrap, dtype)
    elif dtype is not None:
        raise config_error("dtype", str(dtype), "None for a loaded model", "convert the model with .to(dtype)")
    else:
        loaded = model
    refuse_quantised(getattr(loaded, "config", None))
    return loaded, tensors_read


@dataclass(frozen=True)
class Seat:
    """Which block an experts module is, and of what."""

    parallel: ExpertParallel
    block: int


class ExpertParallel:
    """What holds a model's spread experts: close it when the model is no longer used.

    All ranks run the same number of forwards of at most ``M`` tokens, each with its own batch, also when a rank has
    nothing to do: it calls :meth:`idle_step` then, or the others wait for it until the bootstrap's timeout. Inside
    :meth:`serving` none of this needs care.

    Attributes:
        model: the model, changed in place.
        layers: the MoE layer of each block, by the name of its experts module, in the order of the model.
        tensors_read: from a directory, the names of the tensors that this rank read, in the checkpoint's words.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, MoEEpLayer],
        topk: int,
        dtype: torch.dtype,
        tensors_read: tuple[str, ...] = (),
    ) -> None:
        self.model, self.layers, self.tensors_read = model, layers, tensors_read
        self.now_serving: Serving | None = None
        self._destroyed = False
        fleet = self.fleet
        device = fleet.bootstrap.device
        self._nothing = MoEEpTensors(
            torch.empty(0, fleet.params.token_hidden_size, dtype=dtype, device=device),
            torch.empty(0, topk, dtype=torch.int64, device=device),
            torch.empty(0, topk, device=device),
        )

    @property
    def fleet(self) -> Fleet:
        """The one Fleet of all blocks."""
        return next(iter(self.layers.values())).fleet

    @property
    def rank(self) -> int:
        """This rank inside its group."""
        return self.fleet.bootstrap.rank

    @property
    def world_size(self) -> int:
        """``W``: ranks in the group."""
        return self.fleet.bootstrap.world_size

    @contextmanager
    def serving(self) -> Iterator[Serving]:
        """Let each rank run as many forwards as it likes, of any length: ``with parallel.serving(): generate(...)``.

        All ranks enter and leave it. Inside, ranks need not agree on anything: one with fewer prompts, shorter ones or
        none takes part in the others' forwards when it leaves, and leaves when all have. A forward of more than ``M``
        tokens is cut into several steps, on all ranks alike. It costs one step of one row per forward. Within the
        bootstrap's ``timeout_s`` every rank must come to its next forward, or leave.

        Raises:
            MoEEpPeerError: another rank left it with an error; in a forward, or when leaving.
            MoEEpConfigError: it is entered twice, or a forward was broken off and another begun.
        """
        if self._destroyed:
            raise _destroyed()
        if self.now_serving is not None:
            raise config_error("serving", "an entry while it is entered already", "one at a time")
        with Serving(list(self.layers.values()), self._nothing) as serving:
            self.now_serving = serving
            try:
                yield serving
            finally:
                self.now_serving = None

    def memory(self) -> Memory:
        """Bytes that this rank holds: compare :func:`predict_memory`."""
        return measured(self.model, [layer.weights for layer in self.layers.values()], self.fleet)

    def idle_step(self) -> None:
        """Take part in one forward of the other ranks without tokens of one's own: every block, no attention.

        Blocks run in the order of the model's modules, which in the models of transformers is that of a forward.

        Raises:
            MoEEpError: after :meth:`destroy`; see :meth:`moefleet.MoEEpLayer.forward` for the rest.
            MoEEpConfigError: inside :meth:`serving`, where no rank needs it.
        """
        if self._destroyed:
            raise _destroyed()
        if self.now_serving is not None:
            raise config_error("idle_step", "a call inside serving()", "none: leaving it does this")
        for layer in self.layers.values():
            layer(self._nothing)

    def destroy(self) -> None:
        """Give the Fleet and this rank's experts back. Idempotent; the model raises from then on."""
        if self._destroyed:
            return
        self._destroyed = True
        self.fleet.destroy()
        for name, layer in self.layers.items():
            module = self.model.get_submodule(name)
            setattr(module, LAYER, None)
            setattr(module, SEAT, None)
            layer.destroy()
            layer.weights = None

    def __enter__(self) -> ExpertParallel:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.destroy()

    def __repr__(self) -> str:
        what = "destroyed" if self._destroyed else self.fleet.describe()
        return f"ExpertParallel({len(self.layers)} MoE blocks of {type(self.model).__name__}; {what})"


def experts_forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers calls in place of the experts' own forward.

    Args:
        module: an experts module that :func:`expert_parallel` has changed.
        hidden_states: ``[T, H]`` in the experts' dtype.
        top_k_index: ``[T, K]`` int32 or int64.
        top_k_weights: ``[T, K]``, float32 or the model's dtype; sums are float32 either way.

    Returns:
        ``[T, H]``.

    Raises:
        MoEEpError: the module's :class:`ExpertParallel` was destroyed.
        MoEEpConfigError: a gradient is asked for; ``T > M`` and others, see :meth:`moefleet.MoEEpLayer.forward`.
    """
    layer = getattr(module, LAYER, None)
    if layer is None:
        raise _destroyed()
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
        raise config_error(
            "hidden_states and top_k_weights",
            "a tensor that requires a gradient",
            "inference",
            "run the model under torch.no_grad()",
        )
    seat: Seat = getattr(module, SEAT)
    if seat.parallel.now_serving is not None:
        return seat.parallel.now_serving.forward(seat.block, hidden_states, top_k_index, top_k_weights)
    result: torch.Tensor = layer(MoEEpTensors(hidden_states, top_k_index, top_k_weights))
    return result


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_FUNCTION, experts_forward)


def _attach(module: nn.Module, layer: MoEEpLayer, seat: Seat) -> None:
    """Let the module run over this layer. Its config is copied, as other models may share it."""
    setattr(module, LAYER, layer)
    setattr(module, SEAT, seat)
    config = copy.copy(module.config)
    config._experts_implementation_internal = EXPERTS_FUNCTION  # type: ignore[union-attr]
    module.config = config


def _topk(block: Experts, given: int | None) -> int:
    topk = getattr(block.module.config, "num_experts_per_tok", None) if given is None else given
    if not isinstance(topk, int) or topk < 1:
        raise config_error("topk", repr(topk), "at least 1", "say how many experts a token goes to: topk=...")
    return topk


def _device(bootstrap: BootstrapConfig, device: torch.device) -> torch.device:
    if bootstrap.device is None:
        return device
    wanted = torch.device(bootstrap.device)
    if wanted.type != device.type or (wanted.index is not None and wanted.index != device.index):
        raise config_error("bootstrap.device", str(wanted), f"the experts' {device}", "move the model there first")
    return device


def _destroyed() -> MoEEpError:
    return MoEEpError(
        "this model's ExpertParallel was destroyed, and with it this rank's experts; "
        "load the model anew and call expert_parallel"
    )
