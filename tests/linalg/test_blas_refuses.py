"""Wrong arguments of BLAS 2 and 3: refused by name before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import attrs
import numpy as np
import pytest
from chosen import IS_STAND_IN

import trio_accel as ta
from trio_accel import linalg


@attrs.frozen
class Arrays:
    """The arguments of the wrong requests."""

    square: ta.AccelRef
    tall: ta.AccelRef
    x: ta.AccelRef
    single: ta.AccelRef
    whole: ta.AccelRef
    complex: ta.AccelRef


Ask = Callable[[Arrays], Awaitable[object]]
LONG = np.ones(4)
WRONG: dict[str, tuple[Ask, type[Exception], str]] = {
    "gemv of a vector": (
        lambda r: linalg.gemv(1.0, r.x, r.x),
        ValueError,
        r"linalg\.gemv: a must have two axes, got shape \(3,\)",
    ),
    "gemv of a longer vector": (
        lambda r: linalg.gemv(1.0, r.square, LONG),
        ValueError,
        r"gemv: x must have shape \(3,\), got a of shape \(3, 3\) and x of shape \(4,\)",
    ),
    "gemv with a beta alone": (
        lambda r: linalg.gemv(1.0, r.square, r.x, 2.0),
        ValueError,
        "without y, got 2.0",
    ),
    "gemv to an operand": (
        lambda r: linalg.gemv(1.0, r.square, r.x, 0.0, r.x),
        ValueError,
        "y must not share memory with x",
    ),
    "gemv with another letter": (
        lambda r: linalg.gemv(1.0, r.square, r.x, trans="H"),  # type: ignore[arg-type]
        ValueError,
        "gemv: trans must be 'N', 'T' or 'C', got 'H'",
    ),
    "ger of other lengths": (
        lambda r: linalg.ger(1.0, r.x, LONG, r.square),
        ValueError,
        r"ger: a must have shape \(3, 4\), got .* and a of shape \(3, 3\)",
    ),
    "ger of two dtypes": (
        lambda r: linalg.ger(1.0, r.x, np.ones(3, "f"), r.square),
        TypeError,
        "share a dtype, got x float64, y float32",
    ),
    "symv of no square matrix": (
        lambda r: linalg.symv(1.0, r.tall, r.x),
        ValueError,
        r"symv: last 2 dimensions of a must be square, got shape \(4, 3\)",
    ),
    "syr with a complex factor": (lambda r: linalg.syr(1j, r.x, r.square), TypeError, "alpha 1j is complex"),
    "her with a complex factor": (
        lambda r: linalg.syr(1j, np.ones(3, complex), r.complex, hermitian=True),
        ValueError,
        "with hermitian, factors must be real, got alpha 1j",
    ),
    "her2k with a complex beta": (
        lambda r: linalg.syr2k(1.0, np.eye(3) + 0j, np.eye(3) + 0j, 1j, r.complex, hermitian=True),
        ValueError,
        "factors must be real",
    ),
    "syrk of complex matrices, conjugated": (
        lambda r: linalg.syrk(1.0, np.eye(3) + 0j, 0.0, r.complex, "C"),
        ValueError,
        r"syrk: trans must be one of \('N', 'T'\), got 'C'",
    ),
    "herk of complex matrices, not conjugated": (
        lambda r: linalg.syrk(1.0, np.eye(3) + 0j, 0.0, r.complex, "T", hermitian=True),
        ValueError,
        r"trans must be one of \('N', 'C'\), got 'T'",
    ),
    "syrk to a smaller matrix": (
        lambda r: linalg.syrk(1.0, r.tall, 0.0, r.square),
        ValueError,
        r"c must have shape \(4, 4\)",
    ),
    "syr2k of two shapes": (
        lambda r: linalg.syr2k(1.0, np.ones((3, 2)), r.square, 0.0, r.complex),
        TypeError,
        "operands must share a dtype, got a float64, b float64, c complex128",
    ),
    "symm on the other side": (
        lambda r: linalg.symm(1.0, r.square, r.tall),
        ValueError,
        r"symm: b must have shape \(3, n\), got a of shape \(3, 3\) and b of shape \(4, 3\)",
    ),
    "symm on no side": (
        lambda r: linalg.symm(1.0, r.square, r.square, side="U"),  # type: ignore[arg-type]
        ValueError,
        "side must be 'L' or 'R', got 'U'",
    ),
    "symm with a letter for a flag": (
        lambda r: linalg.symm(1.0, r.square, r.tall, side="R", lower="L"),  # type: ignore[arg-type]
        ValueError,
        "lower must be False or True, got 'L'",
    ),
    "trsm of no square matrix": (
        lambda r: linalg.trsm(1.0, r.tall, r.tall),
        ValueError,
        r"trsm: last 2 dimensions of a must be square, got shape \(4, 3\)",
    ),
    "trsm of a vector": (lambda r: linalg.trsm(1.0, r.square, r.x), ValueError, "b must be at least two-dim"),
    "trsm of stacks that do not fit": (
        lambda r: linalg.trsm(1.0, np.ones((2, 3, 3)), np.ones((4, 3, 3)), out=r.square),
        ValueError,
        "trsm",
    ),
    "trsm to its matrix": (
        lambda r: linalg.trsm(1.0, r.square, np.eye(3), out=r.square),
        ValueError,
        "out must not share memory with a",
    ),
    "trsm to a part of the right-hand sides": (
        lambda r: linalg.trsm(1.0, np.eye(2), r.tall[:2], out=r.tall[1:3]),
        ValueError,
        "out must not share memory with b",
    ),
    "trsm with no number": (
        lambda r: linalg.trsm("1", r.square, r.square),  # type: ignore[arg-type]
        TypeError,
        "alpha must be a number, got str",
    ),
    "trsv of integers": (
        lambda r: linalg.trsv(r.whole, np.ones(3, int)),
        TypeError,
        "floating or complex dtype, got int64",
    ),
    "trmv of a host array to change": (
        lambda r: linalg.trmv(r.square, r.x, out=np.ones(3)),  # type: ignore[arg-type]
        TypeError,
        "out must be an AccelRef",
    ),
    "rot of one array": (
        lambda r: linalg.rot(r.x, r.x, 1.0, 0.0),
        ValueError,
        "y must not share memory with x",
    ),
    "rot with a complex cosine": (
        lambda r: linalg.rot(r.complex[0], r.complex[1], 1j, 0.0),  # type: ignore[arg-type]
        TypeError,
        "c 1j is complex",
    ),
    "swap of two shapes": (lambda r: linalg.swap(r.x, r.square), ValueError, "share a shape, got"),
    "swap of two dtypes": (lambda r: linalg.swap(r.square, r.whole), TypeError, "share a dtype"),
    "iamax of nothing": (lambda r: linalg.iamax(r.x[:0]), ValueError, "iamax: x must not be empty"),
    "asum of a matrix": (lambda r: linalg.asum(r.square), ValueError, "x must have one axis"),
    "iamax to a floating number": (
        lambda r: linalg.iamax(r.x, out=r.x[0]),
        ValueError,
        "out must have shape .* and dtype int64",
    ),
}


@pytest.mark.parametrize("case", WRONG)
async def test_wrong_arguments_are_refused(device: ta.Device, case: str) -> None:
    ask, error, text = WRONG[case]
    arrays = Arrays(
        await device.put(np.eye(3)),
        await device.put(np.ones((4, 3))),
        await device.put(np.ones(3)),
        await device.put(np.ones((3, 3), "f")),
        await device.put(np.ones((3, 3), int)),
        await device.put(np.ones((3, 3), complex)),
    )
    launched = (await device.statistics()).launched
    with pytest.raises(error, match=text):
        await ask(arrays)
    assert (await device.statistics()).launched == launched


async def test_half_precision_has_no_triangles(device: ta.Device) -> None:
    a = await device.put(np.eye(2, dtype=np.float16))
    with pytest.raises(ta.NotSupportedError, match="no trsm for float16; it has float32"):
        await linalg.trsm(1.0, a, a)
    assert (await a.to_host()).tolist() == np.eye(2).tolist()


@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has products of general matrices only")
@pytest.mark.parametrize("factor", [math.nan, math.inf])
async def test_infinite_and_nan_factors(device: ta.Device, factor: float) -> None:
    a, b = await device.put(np.eye(2)), np.ones((2, 1))
    for result in (await linalg.trsm(factor, a, b), await linalg.symm(factor, a, b)):
        host = await result.to_host()
        assert np.isnan(host).any() if math.isnan(factor) else not np.isfinite(host).all()
