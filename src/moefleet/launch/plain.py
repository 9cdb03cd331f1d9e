"""Values and errors as JSON, for stores that anybody on the network may write to: what comes is never unpickled."""

from __future__ import annotations

import json
import traceback
from typing import Any

import numpy as np

from .. import errors
from ..errors import MoEEpError
from .results import RankTraceback

ARRAYS = "biuf"  # kinds of dtype: booleans, integers, floats
ERRORS: dict[str, type[Exception]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, MoEEpError)
}
ERRORS["RuntimeError"] = RuntimeError  # torch's own, such as gloo's where a peer has left


def dumps(value: object) -> str:
    """Write ``None``, numbers, texts, arrays of numbers, and lists and dicts (keys are texts) of these, exactly.

    Raises:
        TypeError: it is or contains something else.
    """
    return json.dumps(_plain(value))


def loads(text: str | bytes) -> Any:
    """What :func:`dumps` wrote.

    Raises:
        ValueError, TypeError: it did not write this.
    """
    return _restored(json.loads(text))


def describe(error: Exception) -> dict[str, str]:
    """An error in texts: the nearest class in :data:`ERRORS`, the message, the traceback."""
    kind = next((kind.__name__ for kind in type(error).__mro__ if ERRORS.get(kind.__name__) is kind), "")
    message = str(error) if kind else "".join(traceback.format_exception_only(error)).strip()
    return {"error": kind, "message": message, "traceback": "".join(traceback.format_exception(error))}


def rebuild(said: dict[str, str]) -> Exception:
    """The error that :func:`describe` described; :class:`MoEEpError` where its class is not made from a message."""
    message = said["message"]
    try:
        error = ERRORS.get(said["error"], MoEEpError)(message)
    except TypeError:
        error = MoEEpError(message)
    error.__cause__ = RankTraceback(said["traceback"])
    return error


def _plain(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(each) for key, each in value.items()}}
    if isinstance(value, np.ndarray) and value.dtype.kind in ARRAYS:
        return {"array": [value.dtype.name, list(value.shape), value.ravel().tolist()]}
    raise TypeError(f"a {type(value).__name__}")


def _restored(data: Any) -> Any:
    match data:
        case list():
            return [_restored(each) for each in data]
        case {"dict": dict(items)}:
            return {key: _restored(each) for key, each in items.items()}
        case {"array": [str(name), list(shape), list(values)]} if np.dtype(name).kind in ARRAYS:
            return np.array(values, name).reshape(shape)
        case dict():
            raise ValueError(f"neither a dict nor an array: {', '.join(data)}")
    return data
