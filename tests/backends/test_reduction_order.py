"""Sums have the bits of NumPy's, in pieces of any size, along any axes of any layout."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trio_accel.backends.base import DType
from trio_accel.backends.base.expressions import _pieces, evaluate, parse_reduction, typed

pytestmark = pytest.mark.no_device

Numbers = npt.NDArray[Any]
SHAPES = (
    (3001,),
    (3, 1103),
    (1103, 3),
    (1103, 2),
    (7, 30, 21),
    (2, 300, 9),
    (7, 5, 6, 51),
    (1, 3003),
    (5, 1, 707),
)
FUNCTIONS: dict[str, Any] = {"sum": np.sum, "prod": np.prod, "max": np.max, "any": np.any}


def reduced(text: str, name: str, arrays: tuple[Numbers, ...], axes: tuple[int, ...]) -> Numbers:
    program = typed(parse_reduction(text, name), tuple(DType.of(each.dtype) for each in arrays))
    (made,) = evaluate(program, arrays, shape=arrays[0].shape, axes=axes)
    return made.squeeze(axes)


def layouts(x: Numbers, y: Numbers) -> dict[str, tuple[Numbers, Numbers]]:
    first = y[tuple(slice(1) if axis else slice(None) for axis in range(y.ndim))]
    return {
        "C": (x, y),
        "Fortran": (np.asfortranarray(x), np.asfortranarray(y)),
        "broadcast": (x, np.broadcast_to(first, x.shape)),
        "strided": (np.repeat(x, 2, -1)[..., ::2], y),
    }


@pytest.mark.parametrize("piece", [150, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_order(shape: tuple[int, ...], piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pieces, "_CHUNK_ELEMENTS", piece)
    rng = np.random.default_rng(6)
    x, y = rng.standard_normal((2, *shape))
    subsets = (
        axes for count in range(len(shape) + 1) for axes in itertools.combinations(range(len(shape)), count)
    )
    for axes in subsets:
        for layout, (a, b) in layouts(x, y).items():
            for name, function in FUNCTIONS.items():
                near = np.abs(a) ** 0.01 if name == "prod" else a
                got = reduced("x*y + x", name, (near, b), axes)
                with np.errstate(all="ignore"):
                    want = function(near * b + near, axis=axes)
                np.testing.assert_array_equal(got, want, f"{name} {axes} {layout}")
            short = a.astype(np.float32)
            want = np.sum(short.astype(float), axis=axes).astype(np.float32)
            np.testing.assert_array_equal(reduced("x", "sum", (short,), axes), want, f"{axes} {layout}")
