"""Specifications not made by a plan: fatal errors of a library are refused in advance."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

from trio_accel.backends.base import DType, LibraryError
from trio_accel.backends.base.contract.ops import (
    FIRST,
    PHILOX_START,
    ArraySpec,
    RejectionSpec,
    SequenceSpec,
    SobolSpec,
    contiguous_strides,
)


def array(dtype: str, *shape: int) -> ArraySpec:
    return ArraySpec(1, 0, DType(dtype), shape, contiguous_strides(shape, DType(dtype).itemsize))


SEQUENCE = SequenceSpec("mrg32k3a", 4, array("uint32", 6), array("uint32", 2, 18), array("uint32", 16))
GAMMA = RejectionSpec(
    "gamma", PHILOX_START.pack(1, 2), array("float64", 1), None, array("float32", 9), np.zeros(1, np.int32)
)
POINTS = SobolSpec(FIRST.pack(3), array("uint32", 3, 2), array("uint32", 2), array("uint32", 5, 2))


@pytest.mark.parametrize(
    ("spec", "changes", "error", "match"),
    [
        (
            SEQUENCE,
            {"sequence": "xorwow"},
            ValueError,
            "xorwow needs 6 words of state, and 800 for each jump",
        ),
        (SEQUENCE, {"sequence": "mt19937"}, ValueError, "mt19937 needs 6 words"),
        (SEQUENCE, {"piece": 0}, ValueError, "mrg32k3a needs 6 words of state"),
        (SEQUENCE, {"state": array("uint32", 5)}, ValueError, "needs 6 words of state"),
        (SEQUENCE, {"out": array("uint32", 17)}, ValueError, "2 jumps are too few for 17 words"),
        (SEQUENCE, {"out": array("int64", 9)}, TypeError, "contiguous arrays of uint32"),
        (
            GAMMA,
            {"out": array("int64", 9)},
            TypeError,
            "gamma makes contiguous arrays of float32, float64, not int64",
        ),
        (
            GAMMA,
            {"distribution": "poisson"},
            TypeError,
            "poisson makes contiguous arrays of int64, not float32",
        ),
        (GAMMA, {"b": array("float64", 1)}, ValueError, "b must be given for binomial, and for nothing else"),
        (
            GAMMA,
            {"a": array("float64", 8)},
            TypeError,
            "parameters must be contiguous arrays of float64, one or 9",
        ),
        (GAMMA, {"a": array("float32", 1)}, TypeError, "parameters must be contiguous arrays of float64"),
        (POINTS, {"shift": array("uint32", 3)}, ValueError, "must agree on the number of dimensions"),
        (POINTS, {"out": array("uint32", 6, 2)}, ValueError, "there are only 8 points"),
        (POINTS, {"out": array("float64", 5, 2)}, TypeError, "contiguous arrays of uint32"),
    ],
)
def test_mismatched_arguments_are_refused(
    spec: Any, changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    spec.check_shapes("random.X")
    with pytest.raises(error, match=match):
        attrs.evolve(spec, **changes).check_shapes("random.X")


@pytest.mark.parametrize(
    ("distribution", "match"),
    [
        ("log_gamma", "at least 0, and finite"),
        ("poisson", "lam must be"),
        ("binomial", "n must be an integer"),
    ],
)
def test_a_status_word_is_an_error(distribution: Any, match: str) -> None:
    spec = attrs.evolve(GAMMA, distribution=distribution)
    spec.check_status()
    with pytest.raises(LibraryError, match=match):
        attrs.evolve(spec, fault=np.ones(1, np.int32)).check_status()
