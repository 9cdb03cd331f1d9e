"""Triton's interpreter made to run here, and faster: what it finds out again for every value is remembered.

Nothing is left out that it checks. Importing this changes Triton for the whole process.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
    """The interpreter's scalars are arrays of one element, which NumPy from 2.4 on does not take as an index."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A kernel calls a function, under the patches of its launch: looking for more takes half of all time."""
    if core.is_builtin(tl.load) or core.is_builtin(core.load):
        interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


interpreter._patch_lang_tensor = _patch_tensor_for_numpy
interpreter.InterpretedFunction.__call__ = _call

_numpy_type = interpreter._get_np_dtype
_init_block = core.block_type.__init__
_numpy_types: dict[Any, Any] = {}
_blocks: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def _description(shape: Any) -> tuple[Any, Any]:
    """What a value of this shape says of itself: how many elements, and the shape."""
    return tl.constexpr(math.prod(shape)), core.tuple([tl.constexpr(size) for size in shape])


_of_scalars = _description(())


def _numpy_type_once(kind: Any) -> Any:
    """The type in memory of a scalar type, or of a block's."""
    scalar = kind.scalar
    if scalar.is_ptr():
        return _numpy_type(scalar)
    if scalar not in _numpy_types:
        _numpy_types[scalar] = _numpy_type(scalar)
    return _numpy_types[scalar]


def _init_block_once(self: Any, element_ty: Any, shape: Any) -> None:
    """A type of blocks: its shape was checked, and its name made, when there first was one like it."""
    key = (str(element_ty), *(size.value if isinstance(size, tl.constexpr) else size for size in shape))
    if key not in _blocks:
        _init_block(self, element_ty, shape)
        _blocks[key] = self.shape, self.numel, self.name, _description(self.shape)
    self.element_ty = element_ty
    self.shape, self.numel, self.name, self.of_values = _blocks[key]


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """A value; those of one shape share what describes it."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.of_values if type.is_block() else _of_scalars


interpreter._get_np_dtype = _numpy_type_once
core.block_type.__init__ = _init_block_once
core.tensor.__init__ = _init_tensor


def prepare() -> None:
    """Load the kernels, and rewrite them as their first launch would: in the process that ranks are forked from."""
    import moefleet.transports.nvlink.engine  # noqa: F401 - all of them

    for name, module in list(sys.modules.items()):
        if name.startswith(("moefleet.transports.nvlink.kernels.", "triton.language.")):
            for function in list(vars(module).values()):
                if isinstance(function, interpreter.InterpretedFunction):
                    function.rewrite()
