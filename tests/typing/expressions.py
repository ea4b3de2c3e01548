"""Types of expressions; read by mypy and pyright, never run."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import assert_type

import numpy as np

import trio_accel as ta


async def elementwise(device: ta.Device, x: ta.AccelRef) -> None:
    double = ta.jit.elementwise("2 * x")
    assert_type(await double(x), ta.AccelRef)
    assert_type(await double(x=np.zeros(3), out=x), ta.AccelRef)
    assert_type(await device.ask(double.compute(1.5)), ta.AccelRef)
    polar = ta.jit.elementwise("r = hypot(x, y); phi = arctan2(y, x)", outputs=("r", "phi"), dtypes="float32")
    assert_type(await polar(x, 1j), tuple[ta.AccelRef, ...])
    assert_type(await polar(x, np.float32(1), out=(x, None)), tuple[ta.AccelRef, ...])
    ta.jit.elementwise(1)  # type: ignore[call-overload]
    await double(x, out="x")  # type: ignore[arg-type]


async def reduction(x: ta.AccelRef) -> None:
    norm = ta.jit.reduction("x * x", post="sqrt(a)")
    assert_type(await norm(x, axis=(0, 1), keepdims=True), ta.AccelRef)
    await norm(x, axis="0")  # type: ignore[arg-type]
