"""Differences are counted by bits, and measured in units in the last place."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trio_accel import DType, replay
from trio_accel.replay._compare import difference

TOLD = {"number": 1, "operation": "x", "argument": "out"}


@pytest.mark.parametrize("name", [str(dtype) for dtype in DType])
def test_units_in_the_last_place(name: str) -> None:
    """Neighbours are as many units apart as there are steps between them, also across zero."""
    dtype: Any = DType(name).dtype
    kind = np.dtype(dtype).kind
    if kind == "b":
        pairs = [(False, True, 1), (True, True, 0)]
    elif kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        pairs = [(low, high, int(high) - int(low)), (3, 5, 2), (high, high - 1, 1)]
    else:
        real: Any = np.zeros(1, dtype).real.dtype
        step = ml_dtypes.finfo(real).smallest_subnormal
        pairs = [(1.0, 1.0 + float(ml_dtypes.finfo(real).eps), 1), (-0.0, 0.0, 0), (-2 * step, step, 3)]
    for left, right, ulps in pairs:
        with warnings.catch_warnings(action="ignore"):
            one, two = np.array([[1, left]], dtype), np.array([[1, right]], dtype)
        for pair in ((one, two), (two, one)):
            found = difference(*pair, None, **TOLD)  # type: ignore[arg-type]
            if left is right:
                assert found is None
                continue
            assert found is not None
            assert (found.elements, found.size, found.index) == (1, 2, (0, 1))
            assert found.ulps == ulps


def test_values_without_a_distance() -> None:
    nan = np.array([np.nan, 1.0])
    assert difference(nan, nan.copy(), None, **TOLD) is None  # type: ignore[arg-type]
    assert difference(nan, nan[::-1], replay.Tolerance(relative=1.0), **TOLD) is not None  # type: ignore[arg-type]
    for other in (np.ones((2, 1)), np.ones(2, np.float32), np.ones(3)):
        found = difference(np.ones(2), other, replay.Tolerance(), **TOLD)  # type: ignore[arg-type]
        assert found is not None
        assert (found.ulps, found.index) == (None, ())
    for shape in ((), (0,), (3, 0)):
        array: Any = np.zeros(shape)
        assert difference(array, array.copy(), None, **TOLD) is None  # type: ignore[arg-type]
    found = difference(np.array(1.0), np.array(2.0), None, **TOLD)  # type: ignore[arg-type]
    assert found is not None
    assert (found.elements, found.size, found.index, found.ulps) == (1, 1, (), 1 << 52)
