"""Types of a device for blocking code; read by mypy and pyright, never run."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import Any, assert_type

import numpy.typing as npt

import trio_accel as ta


async def step(x: ta.AccelRef) -> ta.AccelRef:
    return await (x + 1.0)


async def count(x: ta.AccelRef) -> int:
    return int(await x.item())


def notebook(host: npt.NDArray[Any]) -> None:
    b = ta.blocking("cpu")
    x = assert_type(b.wait(b.device.put(host)), ta.AccelRef)
    assert_type(b.wait(step, x), ta.AccelRef)
    assert_type(b.wait(x @ x), ta.AccelRef)
    assert_type(b.get(x), npt.NDArray[Any])
    assert_type(b.get(x @ x + 1.0), npt.NDArray[Any])
    assert_type(b.get(step(x)), npt.NDArray[Any])
    assert_type(b.get(x.to_host()), npt.NDArray[Any])
    assert_type(b.get([x, x]), list[npt.NDArray[Any]])
    assert_type(b.get([x + 1.0, x @ x]), list[npt.NDArray[Any]])
    assert_type(b.get((x, x + 1.0)), tuple[npt.NDArray[Any], ...])
    assert_type(b.get(ta.linalg.qr(x)), tuple[npt.NDArray[Any], ...])
    assert_type(b.get(count(x)), int)
    assert_type(b.get(b.xp.ones(3)), Any)
