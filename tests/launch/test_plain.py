"""Values come back from their text as they were; what is no plain value is refused on both sides."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from moefleet.errors import MoEEpError, MoEEpTransportError
from moefleet.launch import plain


@pytest.mark.parametrize("value", [None, True, 3, 0.1, math.inf, "é", [], {}, {"array": [1, {"dict": {}}]}])
def test_values_come_back_as_they_were(value: Any) -> None:
    assert plain.loads(plain.dumps(value)) == value


@pytest.mark.parametrize(
    "array",
    [
        np.array([[0.1, math.nan], [math.inf, 1e-300]]),
        np.zeros((0, 5)),
        np.arange(3),
        np.array([True]),
        np.float32([0.1]),
    ],
)
def test_arrays_come_back_with_their_type_and_shape(array: Any) -> None:
    back = plain.loads(plain.dumps({"a": array}))["a"]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("value", [(1,), {1: 2}, object(), np.array([object()]), [{"a": b""}]])
def test_other_values_are_not_sent(value: Any) -> None:
    with pytest.raises(TypeError):
        plain.dumps(value)


@pytest.mark.parametrize(
    "text", ['{"a": 1}', '{"array": ["object", [1], [1]]}', '{"array": ["float64", [3], [1]]}', "{"]
)
def test_other_texts_are_not_read(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        plain.loads(text)


def test_an_error_that_is_not_made_from_its_text_keeps_the_text() -> None:
    error = MoEEpTransportError("mmap", 12, "a segment", "ENOMEM")
    back = plain.rebuild(plain.describe(error))
    assert type(back) is MoEEpError and str(back) == str(error)
