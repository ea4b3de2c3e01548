"""Benchmarks of a device, once for each place where its context can live."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import attrs

import trio_accel as ta

from ._harness import Benchmark, Isolation, Plan, Result, first_paragraph

__all__ = ["DeviceFunction", "Stand", "on_device"]


@attrs.frozen(kw_only=True)
class Stand:
    """What a benchmark of a device works with.

    Attributes:
        device: The device, open.
        isolation: Where its context lives.
        plan: How much to measure.
    """

    device: ta.Device
    isolation: Isolation
    plan: Plan

    def name(self, base: str) -> str:
        """The name of a row: as it is inline, with an ending where the context is in a worker process."""
        return _name(base, self.isolation)


DeviceFunction: TypeAlias = Callable[[Stand], Awaitable[tuple[Result, ...]]]


def on_device(name: str, function: DeviceFunction) -> tuple[Benchmark, ...]:
    """Make the benchmarks of one function: inline, and in a worker process.

    Args:
        name: Group and name; that of the isolated one has the ending ``"-process"``.
        function: Measures a device that is open.
    """
    text = first_paragraph(function)
    texts: dict[Isolation, str] = {
        "inline": text,
        "process": f"{text.removesuffix('.')}; in a worker process.",
    }
    return tuple(
        Benchmark(
            _name(name, isolation),
            partial(_run, function, _name(name, isolation), isolation),
            isolation=isolation,
            text=text,
        )
        for isolation, text in texts.items()
    )


async def _run(function: DeviceFunction, name: str, isolation: Isolation, plan: Plan) -> tuple[Result, ...]:
    async with ta.open_system("benchmark") as system:
        try:
            device = await system.open_device(plan.backend, options=ta.DeviceOptions(isolation=isolation))
        except ta.NotSupportedError as error:
            return (Result(name=name, reason=error.message),)
        async with device:
            return await function(Stand(device=device, isolation=isolation, plan=plan))


def _name(base: str, isolation: Isolation) -> str:
    return base if isolation == "inline" else f"{base}-{isolation}"
