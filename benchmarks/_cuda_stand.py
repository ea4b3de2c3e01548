"""Benchmarks of CUDA devices: what they share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import trio

import trio_accel as ta

from ._harness import Benchmark, Goal, Isolation, Plan, Result, first_paragraph
from ._stand import Stand
from ._statistics import Summary
from .rivals import RivalMissingError

__all__ = ["CUDA", "SIZE", "Summaries", "hog_interpreter", "matrix", "on_cuda", "one_row", "opened"]

CUDA = "cuda"
SIZE = 512
"""Rows and columns of the product whose latency is measured, in float32."""

CudaFunction: TypeAlias = Callable[[Stand], Awaitable[tuple[Result, ...]]]
_BOTH: tuple[Isolation, ...] = ("inline", "process")


def on_cuda(
    name: str, function: CudaFunction, isolations: Sequence[Isolation] = _BOTH
) -> tuple[Benchmark, ...]:
    """Make the benchmarks of one function on a CUDA device, for each place where its context can live.

    Args:
        name: Group and name; that of an isolated one has the ending ``"-process"``.
        function: Measures a device that is open.
        isolations: Where its context lives.
    """
    text = first_paragraph(function)
    return tuple(
        Benchmark(
            name if isolation == "inline" else f"{name}-{isolation}",
            partial(_run, function, isolation),
            isolation=isolation,
            text=text if isolation == "inline" else f"{text.removesuffix('.')}; in a worker process.",
        )
        for isolation in isolations
    )


async def _run(function: CudaFunction, isolation: Isolation, plan: Plan) -> tuple[Result, ...]:
    async with opened(plan, ta.DeviceOptions(isolation=isolation)) as device:
        return await function(Stand(device=device, isolation=isolation, plan=plan))


@asynccontextmanager
async def opened(plan: Plan, options: ta.DeviceOptions) -> AsyncGenerator[ta.Device, None]:
    """A CUDA device, in a system of its own.

    Raises:
        RivalMissingError: There is none, or the plan names another.
    """
    spec = plan.backend or CUDA
    if spec.partition(":")[0] != CUDA:
        raise RivalMissingError(f"it is measured on CUDA devices, not on {spec}")
    async with ta.open_system("benchmark") as system:
        try:
            device = await system.open_device(spec, options=options)
        except (ValueError, ta.NotSupportedError) as error:
            raise RivalMissingError(str(error)) from error
        async with device:
            yield device


def matrix(size: int, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[np.generic]:
    """A matrix of ones, or nearly: the same bits as the rival computes with."""
    whole = np.full(size * size * np.dtype(dtype).itemsize // 2, 0x3F80, np.uint16)
    return whole.view(dtype).reshape(size, size)


async def hog_interpreter(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Compute in another thread until cancelled: it wants the interpreter's lock all the time."""
    is_over = False

    def compute() -> None:
        number = 0
        while not is_over:
            number += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, compute)
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            is_over = True


@attrs.define(eq=False)
class Summaries:
    """Rows that have no peer, each of measurements under one name.

    Attributes:
        unit: Of all.
        values: Measurements by the row's name.
    """

    unit: str
    values: dict[str, list[float]] = attrs.field(factory=dict[str, list[float]])

    def add(self, name: str, value: float) -> None:
        """Note a measurement."""
        self.values.setdefault(name, []).append(value)

    def rows(self) -> tuple[Result, ...]:
        """All that were noted, in the order of their first measurements."""
        return tuple(one_row(name, values, self.unit) for name, values in self.values.items())


def one_row(name: str, values: Sequence[float], unit: str, goal: Goal | None = None) -> Result:
    """A row without a peer."""
    return Result(name=name, unit=unit, ours=Summary.of(values), goal=goal)
