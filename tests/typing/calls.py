"""Types of calls in a user's program; read by mypy and pyright, never run."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import trio

import trio_accel as ta
from trio_accel import arrays, linalg, nn


async def service(device: ta.Device, x: npt.NDArray[np.float32], w: ta.AccelRef, b: ta.AccelRef) -> None:
    hidden = assert_type(nn.relu(x @ w + b), ta.Call[ta.AccelRef])
    y = arrays.softmax(hidden @ w.T * 2.0, axis=1)
    on_host = assert_type(y.to_host(), ta.Call[npt.NDArray[Any]])
    assert_type(await on_host, npt.NDArray[Any])
    assert_type(await linalg.matmul(w, 1.0 - b), ta.AccelRef)
    negative = assert_type(-w + np.float32(2) * b, ta.Call[ta.AccelRef])
    assert_type(await negative, ta.AccelRef)
    assert_type(await ((w > b) & ~(w == 1j)), ta.AccelRef)
    assert_type((await (w + 1)[0, 1:].reshape(2, -1).cast("float64").copy()).shape, tuple[int, ...])
    assert_type(await arrays.concat([w, w + b, x], axis=0), ta.AccelRef)
    total: float = await arrays.sum(w * w).item()
    halved = w / 2 if total > 1.0 else w * 2
    assert_type(halved.shape, tuple[int, ...])
    assert_type(halved.start(), ta.Pending[ta.AccelRef])
    q, r = await linalg.qr(w @ b)
    values, vectors = linalg.eigh(w @ w.T)
    scaled = assert_type(values, ta.Call[ta.AccelRef]) * 2.0
    assert_type(await scaled, ta.AccelRef)
    assert_type(await (vectors * values), ta.AccelRef)
    assert_type(await linalg.qr(w)[1], ta.AccelRef)
    assert_type(await arrays.add(q, r, out=w), ta.AccelRef)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(linalg.matmul, w, w)
        nursery.start_soon(nn.relu, w)
    k = w @ b
    mean = arrays.mean(k).item()
    assert_type(
        await ta.gather(k + 1, k.to_host(), k, w),
        tuple[ta.AccelRef, npt.NDArray[Any], ta.AccelRef, ta.AccelRef],
    )
    assert_type((await ta.gather(linalg.qr(k), k))[0][0], ta.AccelRef)
    several = [w * float(number) for number in range(9)]
    assert_type(await ta.gather(*several), tuple[ta.AccelRef, ...])
    assert_type(await ta.gather(k, mean).to_host(), tuple[Any, ...])
    assert_type(await ta.gather(w + b), tuple[ta.AccelRef])
    assert_type(await ta.gather(ta.gather(w, b), w), tuple[tuple[ta.AccelRef, ta.AccelRef], ta.AccelRef])
    replaced = assert_type(w.at[0, ..., 1:].set(1.0), ta.Call[ta.AccelRef])
    assert_type(await replaced, ta.AccelRef)
    assert_type(await (w + b).at[w > 0].add(b), ta.AccelRef)
    z = w + b
    z += 1
    assert_type(await z, ta.AccelRef)


@ta.step
def layer(x: ta.AccelRef, w: ta.AccelRef, scale: float) -> ta.Call[npt.NDArray[Any]]:
    return (nn.relu(x @ w) * scale).to_host()


@ta.step(static="count")
def both(x: ta.AccelRef, *, count: int) -> ta.Call[ta.AccelRef]:
    return x * float(count)


def two(x: ta.AccelRef) -> tuple[ta.Call[ta.AccelRef], ta.Call[npt.NDArray[Any]]]:
    return x + 1, x.to_host()


async def steps(x: ta.AccelRef, w: ta.AccelRef) -> None:
    assert_type(await layer(x, w, 0.5), npt.NDArray[Any])
    assert_type(await both(x, count=3), ta.AccelRef)
    assert_type(await ta.step(two)(x), tuple[Any, ...])
    await layer(x, "w", 0.5)  # type: ignore[arg-type]
    await layer(x, w)  # type: ignore[call-arg]


async def mistakes(x: ta.AccelRef, plain: list[float]) -> None:
    y = x + 1.0
    # A call where an array is wanted, and the other way round.
    ref: ta.AccelRef = x * 2.0  # type: ignore[assignment]
    await x.copy_to(device=y)  # type: ignore[arg-type]
    x += 1.0  # type: ignore[assignment]
    # Invalid operands.
    await (x + "1")  # type: ignore[operator]
    await (y @ plain)  # type: ignore[operator]
    await linalg.matmul(y, plain)  # type: ignore[arg-type]
    # The host lacks such methods, and a call lacks elements.
    await y.to_host().cast("float32")  # type: ignore[misc]
    y[0] = 1.0  # type: ignore[index]
    # Wrong values of arguments.
    await arrays.sum(y, axis="0")  # type: ignore[arg-type]
    await linalg.gemm(1.0, y, x, 0.0, x, "X")  # type: ignore[arg-type]
    await arrays.add(x, y, out=y)  # type: ignore[arg-type]
    # No calls, and options of other libraries.
    ta.gather(x, plain)  # type: ignore[call-overload]
    ta.gather([x, x])  # type: ignore[call-overload]
    ta.gather(x, x, return_exceptions=True)  # type: ignore[call-overload]
    print((await ta.gather(x, x))[2])  # type: ignore[misc]
    assert ref
