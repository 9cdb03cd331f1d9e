"""Kernels compiled once, bound to most of their arguments, and launched with a few addresses.

Triton's own launch path inspects every argument each time, which costs more than the kernel. Here a kernel is
compiled for one kind of arguments, and a later launch of that kind goes straight to its launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import triton

from ...errors import config_error
from .kernels.signals import INTERPRETED


class Launch(Protocol):
    """A kernel with its arguments."""

    def __call__(self, stream: int, *first: torch.Tensor) -> None:
        """Run with these tensors in place of the first arguments; they are of the kind that it was bound with."""


class Launcher:
    """Binds kernels; keeps what was compiled. Attributes: ``around_compiling``, entered while a kernel is compiled."""

    def __init__(self) -> None:
        self._compiled: dict[Hashable, Any] = {}
        self.around_compiling: Callable[[], AbstractContextManager[None]] = nullcontext

    def bind(
        self, kernel: Any, grid: int, args: tuple[Any, ...], constants: tuple[Any, ...], options: dict[str, Any]
    ) -> Launch:
        """``kernel`` on ``grid`` programs. ``args`` are tensors and integers; ``constants`` are constexprs, last."""
        if INTERPRETED:
            return _Interpreted(kernel, grid, args, constants)
        key = (kernel.__name__, constants, tuple(options.items()), *map(kind, args))
        if key in self._compiled:
            return _Bound(self._compiled[key], grid, args, constants)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise config_error(
                f"{kernel.__name__} in a CUDA graph",
                "a kernel that never ran for these shapes, dtypes and strides",
                "kernels that are compiled already",
                "run the same step once before the capture, on all ranks; MoEEpLayer.capture does",
            )
        with self.around_compiling():
            compiled = kernel.warmup(*args, *constants, grid=(1,), **options)
            self._compiled[key] = compiled.result() if hasattr(compiled, "result") else compiled
            return _Bound(self._compiled[key], grid, args, constants)


def kind(arg: Any) -> tuple[Hashable, ...]:
    """What Triton compiles differently for: types, alignment, strides of 1."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    return arg == 1, arg % 16 == 0, arg.bit_length() > 31


class _Bound:
    def __init__(self, compiled: Any, grid: int, args: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        run = compiled.run  # loads the code
        front = [compiled.function, compiled.packed_metadata, None, None, None]
        if triton.__version__.startswith("3.6.") and not (run.global_scratch_size or run.profile_scratch_size):
            # The launcher's own function, without the Python around it that allocates scratch.
            cooperative, early = run.launch_cooperative_grid, run.launch_pdl
            front = [compiled.function, cooperative, early, None, None, compiled.packed_metadata, None, None, None]
            run = run.launch
        self._run, self._all = run, [grid, 1, 1, 0, *front, *plain, *constants]
        self._first = 4 + len(front)

    def __call__(self, stream: int, *first: torch.Tensor) -> None:
        everything = self._all
        everything[3] = stream
        for at, tensor in enumerate(first, self._first):
            everything[at] = tensor.data_ptr()
        self._run(*everything)


class _Interpreted:
    def __init__(self, kernel: Any, grid: int, args: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        self._kernel, self._grid, self._args = kernel, grid, args + constants

    def __call__(self, stream: int, *first: torch.Tensor) -> None:
        as_bound = [tensor.view(bound.dtype) for tensor, bound in zip(first, self._args)]
        self._kernel[(self._grid,)](*as_bound, *self._args[len(first) :])
