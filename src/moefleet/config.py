"""What a Fleet is made from: who takes part, how large everything is, and which backend runs it.

Symbols used in every docstring: ``W`` ranks, ``E`` experts, ``L`` local experts, ``T`` tokens of this rank this
step, ``M`` = ``max_tokens_per_rank``, ``K`` top-k, ``H`` hidden size, ``I`` expert intermediate size.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from .errors import config_error


class EpAlgorithm(enum.Enum):
    """LOW_LATENCY serves decode steps (few tokens), HIGH_THROUGHPUT serves prefill and training-size batches."""

    LOW_LATENCY = "low_latency"
    HIGH_THROUGHPUT = "high_throughput"


class EpLayout(enum.Enum):
    """How received rows lie in memory: see :class:`moefleet.DispatchOutput` for the shapes."""

    EXPERT_MAJOR = "expert_major"
    RANK_MAJOR = "rank_major"
    FLAT = "flat"


LAYOUTS_OF = {
    EpAlgorithm.LOW_LATENCY: (EpLayout.EXPERT_MAJOR, EpLayout.RANK_MAJOR),
    EpAlgorithm.HIGH_THROUGHPUT: (EpLayout.FLAT,),
}


@dataclass(frozen=True)
class BootstrapConfig:
    """Who this rank is and how it finds the others.

    Args:
        world_size: number of ranks ``W`` in the group, at least 1.
        rank: this rank inside the group, ``0 <= rank < world_size``. The group may be any subset of a larger
            world, in any order.
        stream: raw handle of the CUDA stream that the Fleet's work goes to; 0 is the current stream. ``MoEEpLayer``
            runs all of a forward there, in order with the current stream; with handles, that order is the caller's.
        auto_bootstrap: create a missing store or process group from ``MASTER_ADDR`` and ``MASTER_PORT``.
        device: where the Fleet's tensors live; ``None`` means the CPU transports' CPU, or the current CUDA device.
            Never guessed from a global rank.
        nccl_comm: an NCCL communicator to adopt (NCCL-based transports only); never destroyed by moefleet.
        process_group: a ``torch.distributed`` group of these ranks; never destroyed by moefleet.
        tcp_store: a ``torch.distributed.Store`` that all ranks reach. Two groups that share one need a
            ``torch.distributed.PrefixStore`` each.
        timeout_s: longest wait for a peer, in seconds, where no shorter budget is set.
        incarnation: a number for this process among its restarts, for whoever reads the store; drawn at random if
            ``None``. It does not let a restarted process take the place of the one before.

    Raises:
        MoEEpConfigError: a value is out of range.
    """

    world_size: int
    rank: int
    stream: int = 0
    auto_bootstrap: bool = True
    device: torch.device | str | None = None
    nccl_comm: Any = None
    process_group: Any = None
    tcp_store: Any = None
    timeout_s: float = 300.0
    incarnation: int | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise config_error("BootstrapConfig.world_size", self.world_size, "at least 1")
        if not 0 <= self.rank < self.world_size:
            raise config_error(
                "BootstrapConfig.rank",
                self.rank,
                f"0 to {self.world_size - 1}",
                "give the rank inside the group, not the global one",
            )
        if not self.timeout_s > 0:
            raise config_error("BootstrapConfig.timeout_s", self.timeout_s, "more than 0 seconds")

    @classmethod
    def from_env(cls, **overrides: Any) -> BootstrapConfig:
        """Read ``RANK`` and ``WORLD_SIZE``, as torchrun sets them. Keyword arguments replace fields.

        The device is not read from ``LOCAL_RANK``: pass ``device=`` or set the current device first.
        """
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
        if missing:
            raise config_error(
                "BootstrapConfig.from_env",
                f"no {' and no '.join(missing)} in the environment",
                "an environment as torchrun makes it",
                "start with `torchrun --nproc-per-node N script.py`, or use moefleet.launch",
            )
        for name in ("RANK", "WORLD_SIZE"):
            if not os.environ[name].strip().isdecimal():
                raise config_error(f"BootstrapConfig.from_env {name}", repr(os.environ[name]), "a whole number")
        return replace(cls(int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])), **overrides)


@dataclass(frozen=True)
class FleetParams:
    """Everything that a Fleet's buffers are sized from, once, at construction. Must be equal on all ranks.

    Args:
        num_experts: ``E``, over all ranks.
        max_tokens_per_rank: ``M``, the most tokens that one rank brings in a step.
        token_hidden_size: ``H``.
        dtype_bytes: width of an element of the rows that a rank brings: 2 (bfloat16, float16) or 4 (float32), there
            and back, or 1 (fp8) with bfloat16 or float16 on the way back. With FleetAlgoKnobQuantization this is still
            the width of what a rank brings and combine carries; what dispatch carries follows from the knob.
        algorithm, layout: ``layout=None`` means EXPERT_MAJOR for LOW_LATENCY and FLAT for HIGH_THROUGHPUT.
        max_topk: largest ``K`` of any step.
        scale_bytes_per_token: bytes of the scale row that travels with each token (0: no scales).
        max_recv_tokens_per_rank: HIGH_THROUGHPUT only, rows that one rank can receive in a step; ``None`` means
            ``M * W``, with which nothing can overflow.

    Raises:
        MoEEpConfigError: a value is out of range, or the layout does not belong to the algorithm.
    """

    num_experts: int
    max_tokens_per_rank: int
    token_hidden_size: int
    dtype_bytes: int = 2
    algorithm: EpAlgorithm = EpAlgorithm.LOW_LATENCY
    layout: EpLayout | None = None
    max_topk: int = 32
    scale_bytes_per_token: int = 0
    max_recv_tokens_per_rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_experts", "max_tokens_per_rank", "token_hidden_size", "max_topk"):
            if getattr(self, name) < 1:
                raise config_error(f"FleetParams.{name}", getattr(self, name), "at least 1")
        if self.dtype_bytes not in (1, 2, 4):
            raise config_error(
                "FleetParams.dtype_bytes", self.dtype_bytes, "1 (fp8), 2 (bfloat16, float16), 4 (float32)"
            )
        if self.scale_bytes_per_token < 0:
            raise config_error("FleetParams.scale_bytes_per_token", self.scale_bytes_per_token, "0 or more")
        if not isinstance(self.algorithm, EpAlgorithm):
            raise config_error("FleetParams.algorithm", repr(self.algorithm), " or ".join(map(str, EpAlgorithm)))
        if self.layout is not None and not isinstance(self.layout, EpLayout):
            raise config_error("FleetParams.layout", repr(self.layout), "None, " + " or ".join(map(str, EpLayout)))
        allowed = LAYOUTS_OF[self.algorithm]
        if self.layout is None:
            object.__setattr__(self, "layout", allowed[0])
        elif self.layout not in allowed:
            raise config_error(
                "FleetParams.layout",
                f"{self.layout.name} with {self.algorithm.name}",
                " or ".join(layout.name for layout in allowed) + f" with {self.algorithm.name}",
                "FLAT belongs to HIGH_THROUGHPUT, EXPERT_MAJOR and RANK_MAJOR to LOW_LATENCY",
            )
        if self.max_recv_tokens_per_rank is not None:
            if self.algorithm is not EpAlgorithm.HIGH_THROUGHPUT:
                raise config_error(
                    "FleetParams.max_recv_tokens_per_rank",
                    f"{self.max_recv_tokens_per_rank} with {self.algorithm.name}",
                    "HIGH_THROUGHPUT only",
                    "leave it out: LOW_LATENCY buffers always fit",
                )
            if self.max_recv_tokens_per_rank < 1:
                raise config_error(
                    "FleetParams.max_recv_tokens_per_rank", self.max_recv_tokens_per_rank, "at least 1 row"
                )

    @property
    def resolved_layout(self) -> EpLayout:
        """The layout in force (never ``None``)."""
        assert self.layout is not None
        return self.layout

    @property
    def combine_bytes(self) -> int:
        """Width of an element of combine's rows: ``dtype_bytes``, or 2 where the rows that a rank brings are fp8."""
        return max(2, self.dtype_bytes)

    def recv_capacity(self, world_size: int) -> int:
        """Rows that a rank's receive side holds for each of its units: ``M*W``, or less for HT if declared so."""
        full = self.max_tokens_per_rank * world_size
        return full if self.max_recv_tokens_per_rank is None else min(full, self.max_recv_tokens_per_rank)

    def received_shape(self, world_size: int, num_local: int) -> tuple[int, ...]:
        """Shape of ``expert_tensors`` without ``H``, on a rank with ``num_local`` experts."""
        if self.layout is EpLayout.EXPERT_MAJOR:
            return (num_local, self.max_tokens_per_rank * world_size)
        if self.layout is EpLayout.RANK_MAJOR:
            return (world_size, self.max_tokens_per_rank)
        return (self.recv_capacity(world_size),)


@dataclass(frozen=True)
class CommConfig:
    """Options of one transport. ``name`` is the transport's registry name."""

    name: ClassVar[str] = ""


@dataclass(frozen=True)
class ShmConfig(CommConfig):
    """CPU ranks of one host over shared memory.

    Args:
        spin_us: how long a wait looks again and again (yielding its core) before it sleeps in the kernel, in time of
            the thread's own; ``None`` chooses 2000 microseconds, or 100 where ranks outnumber cores.
        place_bytes: in EXPERT_MAJOR and FLAT, tokens of at least so many bytes are placed in their receivers' memory
            by the rank that brings them, fewer are fetched; ``None`` chooses 256 KiB. To place them takes another wait,
            for lower ranks; so halves are always fetched. In RANK_MAJOR tokens are always placed. Nothing is without
            the compiled helper, or while a rank is masked.
    """

    name: ClassVar[str] = "shm"
    spin_us: float | None = None
    place_bytes: int | None = None


@dataclass(frozen=True)
class TorchDistConfig(CommConfig):
    """Any ``torch.distributed`` process group (gloo, NCCL, MPI), one host or many."""

    name: ClassVar[str] = "torch_dist"


@dataclass(frozen=True)
class NVLinkConfig(CommConfig):
    """GPUs that can map each other's memory.

    Args:
        programs: programs of dispatch and of combine; ``None``: by layout and GPU. All must fit on the GPU at once.
        senders: how many of them send; where fewer than all, the others receive. ``None``: by layout.
        count: whether kernels count rows and waits for ``Fleet.stats()``; if not, those entries are ``None``.
    """

    name: ClassVar[str] = "nvlink"
    programs: int | None = None
    senders: int | None = None
    count: bool = True

    def __post_init__(self) -> None:
        if self.programs is not None and self.programs < 1:
            raise config_error("NVLinkConfig.programs", self.programs, "at least 1")
        if self.senders is not None and not 1 <= self.senders <= (self.programs or self.senders):
            raise config_error("NVLinkConfig.senders", self.senders, f"1 to programs = {self.programs}")


@dataclass(frozen=True)
class NCCLEPConfig(CommConfig):
    """NVIDIA's NCCL-EP library."""

    name: ClassVar[str] = "nccl_ep"


@dataclass(frozen=True)
class NIXLEPConfig(CommConfig):
    """NVIDIA's NIXL-EP library."""

    name: ClassVar[str] = "nixl_ep"


@dataclass(frozen=True)
class KernelConfig:
    """Options of one expert kernel. ``name`` is the kernel's registry name."""

    name: ClassVar[str] = ""


@dataclass(frozen=True)
class IdentityConfig(KernelConfig):
    """Experts that return their input: for tests and for measuring communication alone. Needs no weights."""

    name: ClassVar[str] = "identity"


@dataclass(frozen=True)
class GroupedGemmConfig(KernelConfig):
    """Gated experts ``w2 @ (act(gate) * (up + up_shift))``, with biases where the weights have them.

    Args:
        activation: ``"silu"``, ``"gelu"`` (erf), ``"gelu_tanh"`` or ``"relu"``, applied to the gate half.
        limit: first clamps gate to at most ``limit`` and up to ``[-limit, limit]``; ``None`` for no clamping.
        alpha: for ``"silu"``: ``gate * sigmoid(alpha * gate)``.
        up_shift: added to the (clamped) up half.
    """

    name: ClassVar[str] = "grouped_gemm"
    activation: str = "silu"
    limit: float | None = None
    alpha: float = 1.0
    up_shift: float = 0.0


@dataclass(frozen=True)
class SplitConfig:
    """The split path: a transport and an expert kernel.

    Args:
        comm: ``"auto"``, a transport's name, or its config.
        kernel: a kernel's name or its config.
    """

    comm: CommConfig | str = "auto"
    kernel: KernelConfig | str = GroupedGemmConfig()


@dataclass(frozen=True)
class MegaConfig:
    """The mega path: one fused kernel that dispatches, computes and combines.

    Args:
        megakernel: the fused kernel's name.
        quantize_input: let the kernel quantise bf16 activations itself.
        preprocess_weights: bring the weights into the kernel's format at construction.
        transformed_weights: weights that are already in that format; then nothing is preprocessed.
    """

    megakernel: str
    quantize_input: bool = True
    preprocess_weights: bool = True
    transformed_weights: Any = None


def resolve_device(bootstrap: BootstrapConfig) -> torch.device:
    """The device that the caller named, else the current accelerator, else the CPU."""
    if bootstrap.device is not None:
        return torch.device(bootstrap.device)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
