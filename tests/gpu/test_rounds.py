"""Faults of the device under a load of which every fate is known; arrays survive them all."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import attrs
import driver
import pytest
from chosen import BACKEND
from processes import until
from recovery_load import (
    AT_ONCE,
    IN_FLIGHT,
    MANY,
    TRIGGER,
    Base,
    Load,
    Times,
    play,
    wait_death,
    wait_loss,
)
from scale import IS_SMALL, ROUNDS, scaled
from test_recovery_rounds import hang, kill
from witnesses import MIB, Witnesses, sizes_from_to

import trio_accel as ta

STUCK_AFTER = scaled(1.0, 3.0)
MOST_AFTER_SEEN = 0.1
# The watchdog of the worker sees a fault within this time.
LOOKS = 0.05
# The system takes at most this time to end a process with a context; until then it may write to host arrays.
TO_DIE = 0.15


@attrs.frozen(kw_only=True)
class Kind:
    """A fault.

    Attributes:
        name: Its name.
        strike: Makes it happen, when the load has been handed over.
        heads: The fate of the first operation on each stream.
        is_hang: The device does not report it.
        seen: Waits until it can be seen by the application.
        reported: The driver's report, if any.
        lost: The error class of requests in flight.
    """

    name: str
    strike: Callable[[Load], Awaitable[None]]
    heads: dict[str, Any] | None = None
    is_hang: bool = False
    seen: Callable[[ta.Device], Any] = wait_death
    reported: str | None = None
    lost: type[ta.ContextLostError] = ta.ContextLostError

    def __str__(self) -> str:
        return self.name


async def poison(how: Any, load: Load) -> None:
    ta.testing.inject_fault(load.device, ta.random.Bits, poison=True, how=how)
    with pytest.raises(ta.ContextPoisonedError) as caught:
        await load.device.ask(TRIGGER)
    assert caught.value.operation == "random.Bits"


def reported(how: str) -> Kind:
    lost = ta.ContextPoisonedError
    return Kind(name=how, strike=partial(poison, how), seen=wait_loss, reported=how, lost=lost)


ADDRESS = reported("illegal_address")
WRITING = Kind(name="killed-while-writing", strike=kill, heads={"hang": True, "how": "writing"})
ENDLESS = Kind(name="endless", strike=hang, heads={"hang": True, "how": "kernel"}, is_hang=True)
KINDS = [
    (ADDRESS, 0),
    (reported("trap"), 0),
    (reported("assert"), 0),
    (WRITING, 0),
    (ENDLESS, 0),
    (ADDRESS, 1),
    (WRITING, 1),
]


def options(kind: Kind, spares: int) -> ta.DeviceOptions:
    return ta.DeviceOptions(
        isolation="process",
        in_flight=IN_FLIGHT,
        spares=spares,
        intensity=MANY,
        backoff=AT_ONCE,
        stuck_after=STUCK_AFTER if kind.is_hang else None,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "spares"), KINDS, ids=[f"{kind}{'-spare' * spares}" for kind, spares in KINDS]
)
async def test_each_request_has_the_fate_of_its_class_and_arrays_survive(
    system: ta.System, kind: Kind, spares: int
) -> None:
    sizes = sizes_from_to(64, *scaled((MIB, 1024 * MIB), (8 << 10, MIB)))
    times = Times()
    async with system.open_device(BACKEND, options=options(kind, spares)) as device:
        witnesses = await Witnesses.put(device, sizes)
        base = await Base.make(device, scaled(64, 4) * MIB)
        for _ in range(ROUNDS):
            await until(lambda: device.dispatch.spares == spares)
            await play(
                base,
                times,
                is_hang=kind.is_hang,
                strike=kind.strike,
                heads=kind.heads,
                seen=kind.seen,
                lost=kind.lost,
            )
        assert device.generation == 1 + ROUNDS
        await witnesses.check()
    check_times(kind, times)


def check_times(kind: Kind, times: Times) -> None:
    """Errors come soon after the fault can be seen: by the application, and by whoever asks the driver."""
    print(
        f"{kind}: last error {statistics.median(times.errors) * 1e3:.1f} ms after the loss was seen "
        f"(at most {max(times.errors) * 1e3:.1f}), {statistics.median(times.felt) * 1e3:.1f} ms after the "
        f"fault; right product behind the load {statistics.median(times.gemms) * 1e3:.1f} ms"
    )
    assert len(times.gemms) == ROUNDS
    if IS_SMALL:
        return
    assert max(times.errors) <= MOST_AFTER_SEEN
    if kind.reported is not None:
        visible = driver.seconds_to_report(kind.reported) + LOOKS
    else:
        visible = (STUCK_AFTER + LOOKS if kind.is_hang else 0.0) + TO_DIE
    assert statistics.median(times.felt) <= visible + MOST_AFTER_SEEN


@pytest.mark.timeout(600)
async def test_much_memory_survives(system: ta.System) -> None:
    """64 GiB, or all memory of the device."""
    sizes = sizes_from_to(64, *scaled((1024 * MIB, 1024 * MIB), (MIB, MIB)))
    async with system.open_device(BACKEND, options=options(ADDRESS, 0)) as device:
        witnesses = await Witnesses.put(device, sizes)
        base = await Base.make(device, MIB)
        await play(base, Times(), is_hang=False, strike=ADDRESS.strike, seen=wait_loss, lost=ADDRESS.lost)
        await witnesses.check()
