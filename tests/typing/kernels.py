"""What type checkers know of kernels of one's own; read by mypy and pyright, never run."""

from __future__ import annotations

from typing import assert_type

import trio_accel as ta
from trio_accel import jit
from trio_accel.backends.base.ops import ArraySpec


def blocks(x: ArraySpec) -> int:
    return jit.cdiv(x.size, 256)


scale = jit.Kernel(
    "scale",
    "",
    parameters={"a": jit.scalar("float32"), "x": jit.updates("float32")},
    grid=blocks,
    block=(256, 1),
    options=jit.CompileOptions(macros={"N": 4, "F": None}),
)


async def launches(device: ta.Device, x: ta.AccelRef) -> None:
    assert_type(await scale(2.0, x), tuple[ta.AccelRef, ...])
    assert_type(await scale(a=2, x=x), tuple[ta.AccelRef, ...])
    assert_type(await device.ask(scale.launch(2.0, x)), tuple[ta.AccelRef, ...])
    assert_type(await scale.occupancy(device), jit.Occupancy)
    assert_type(device.submit(scale.launch(2.0, x)), ta.Pending[tuple[ta.AccelRef, ...]])
