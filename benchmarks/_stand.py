"""Benchmarks of a device, once for each place where its context can live."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import TypeAlias

import attrs

import trio_accel as ta

from ._harness import Benchmark, Isolation, Plan, Result, first_paragraph

__all__ = ["DeviceFunction", "Devices", "Stand", "on_device", "open_devices"]


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


@attrs.define(eq=False)
class Devices:
    """Devices that are opened once: a worker's start takes longer than a quick look at a benchmark.

    Each has a system of its own: two contexts on one device are meant here. They end with the stack.
    """

    _stack: AsyncExitStack
    _opened: dict[Isolation, ta.Device] = attrs.field(factory=dict[Isolation, ta.Device], init=False)

    async def open(self, spec: str | None, isolation: Isolation) -> ta.Device:
        """Open a device, or return the one that is open.

        Raises:
            NotSupportedError: It has no such isolation.
        """
        if isolation not in self._opened:
            # Benchmarks hold the loop with what they prepare and with their peers.
            unwatched = ta.SystemOptions(held_after=None)
            system = await self._stack.enter_async_context(ta.open_system("benchmark", options=unwatched))
            options = ta.DeviceOptions(isolation=isolation)
            self._opened[isolation] = await system.open_device(spec, options=options)
        return self._opened[isolation]  # noqa: ASYNC910  # a benchmark checkpoints


@asynccontextmanager
async def open_devices() -> AsyncGenerator[Devices, None]:
    """Open none yet; close at the end those that were opened meanwhile."""
    async with AsyncExitStack() as stack:
        yield Devices(stack)


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
    async with open_devices() if plan.devices is None else nullcontext(plan.devices) as devices:
        try:
            device = await devices.open(plan.backend, isolation)
        except ta.NotSupportedError as error:
            return (Result(name=name, reason=error.message),)
        return await function(Stand(device=device, isolation=isolation, plan=plan))


def _name(base: str, isolation: Isolation) -> str:
    return base if isolation == "inline" else f"{base}-{isolation}"
