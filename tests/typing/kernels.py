"""What type checkers know of kernels of one's own; read by mypy and pyright, never run."""

# A `type: ignore` that nothing needs is an error here: it marks what the checkers must refuse.
# pyright: reportUnnecessaryTypeIgnoreComment=true

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

# Rules as lambdas, of arrays, scalars and the block, without a cast.
rules = jit.Kernel(
    "rules",
    "",
    parameters={
        "n": jit.scalar("int64"),
        "x": jit.reads("float32"),
        "y": jit.writes("float32", shape=lambda x: x.shape),
        "z": jit.writes("float32", shape=lambda n, x: (*x.shape[1:], 2 * n)),
    },
    grid=lambda n: jit.cdiv(n, 256),
    block=lambda n, x, y: (min(n, x.size), y.shape[0]),
    shared=lambda block: 4 * block[0],
)
jit.Kernel("rules", "", parameters={}, grid=lambda a, b, c, d, e, f: a + b + c + d + e + f, block=1)
jit.Kernel("rules", "", parameters={}, grid=lambda n, m=1: (n, m), block=lambda block: block)


class Sizes:
    def of(self, x: ArraySpec, n: int = 1) -> tuple[int, ...]:
        return (x.size, n)


jit.Kernel("rules", "", parameters={}, grid=Sizes().of, block=1, shared=lambda n: n)
jit.Kernel("rules", "", parameters={}, grid=lambda **every: every["n"], block=lambda: 1)

jit.Kernel("rules", "", parameters={}, grid=lambda n: "x", block=1)  # type: ignore[arg-type]
jit.Kernel("rules", "", parameters={}, grid=1, block=1, shared=Sizes().of)  # type: ignore[arg-type]
jit.writes("float32", shape="x")  # type: ignore[arg-type]


async def launches(device: ta.Device, x: ta.AccelRef) -> None:
    assert_type(await scale(2.0, x), tuple[ta.AccelRef, ...])
    assert_type(await scale(a=2, x=x), tuple[ta.AccelRef, ...])
    assert_type(await device.ask(scale.launch(2.0, x)), tuple[ta.AccelRef, ...])
    assert_type(await scale.occupancy(device), jit.Occupancy)
    assert_type(device.submit(scale.launch(2.0, x)), ta.Pending[tuple[ta.AccelRef, ...]])
