"""The faults of ``demo recover``, one after the other under load, and how long each was felt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import trio

import trio_accel as ta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trio_accel.cli._device import Isolation
    from trio_accel.cli._load import Load

__all__ = ["REASON", "Fault", "FaultReport", "faults_of", "inject"]

REASON = "injected"
# A fault that has not been felt, or not been recovered from, after so many requests never will be.
_PATIENCE = 500


@attrs.frozen
class Fault:
    """Something that is made to fail.

    Attributes:
        name: Its short name.
        text: What fails.
        losses: Contexts that it costs.
        inject: Makes it happen.
    """

    name: str
    text: str
    losses: int
    inject: Callable[[ta.Device], object] = attrs.field(eq=False)


@attrs.frozen(kw_only=True)
class FaultReport:
    """What a fault came to.

    Attributes:
        fault: Its name.
        text: What was made to fail.
        losses: Contexts that it costs.
        generation_before: Generation of the device before it.
        generation_after: The generation that served again.
        failed: Requests that failed from its injection on, until the device served again.
        recovery_ms: From its injection to the end of the next request that was begun when it had been
            felt, and got the right product; ``None`` if no request felt it or none was served after it.
    """

    fault: str
    text: str
    losses: int
    generation_before: int
    generation_after: int
    failed: int
    recovery_ms: float | None


def _inject(device: ta.Device, **how: Any) -> None:
    ta.testing.inject_fault(device, ta.linalg.Matmul, **how)


_CRASH = Fault("crash", "crash of the BLAS actor", 0, lambda on: _inject(on, fail=RuntimeError(REASON)))
_POISON = Fault("poison", "poison of the context", 1, lambda on: ta.testing.poison(on, REASON))
_TRAP = Fault("trap", "trap in a kernel", 1, lambda on: _inject(on, poison=True, how="trap"))
_ASSERT = Fault(
    "assert", "failed assertion in a kernel", 1, lambda on: _inject(on, poison=True, how="assert")
)
_KILL = Fault("kill", "SIGKILL to the worker process", 1, lambda on: _inject(on, kill=True, how="writing"))


def faults_of(device: ta.Device, isolation: Isolation) -> Sequence[Fault]:
    """The faults that a device in this isolation can survive, the mildest first."""
    if isolation == "inline":
        # There the worker is this process.
        return _CRASH, _POISON
    # Without kernels a trap and an assertion are the same as the poison.
    of_kernels = () if device.info.backend == "cpu" else (_TRAP, _ASSERT)
    found = (_CRASH, _POISON, *of_kernels, _KILL)
    limit = device.options.stuck_after
    if limit is None:
        # A hung operation would be waited for.
        return found
    text = f"hang, given up after {limit:g} s"
    return *found, Fault("hang", text, 1, lambda on: _inject(on, hang=True, how="kernel"))


async def inject(fault: Fault, load: Load) -> FaultReport:
    """Inject a fault under load and wait until the device serves again.

    Raises:
        DeviceLostError: The device does not come back.
    """
    first, generation = len(load.fates), load.device.generation
    start = trio.current_time()
    load.after = fault.name
    fault.inject(load.device)
    while (recovered := _recovered(load, first)) is None and len(load.fates) < first + _PATIENCE:
        await load.wait_change()
    seconds = trio.current_time() - start
    return FaultReport(
        fault=fault.name,
        text=fault.text,
        losses=fault.losses,
        generation_before=generation,
        generation_after=load.device.generation,
        failed=sum(not fate.is_completed for fate in load.fates[first:]),
        recovery_ms=None if recovered is None else seconds * 1e3,
    )


def _recovered(load: Load, first: int) -> int | None:
    """The request that shows that a fault is over: begun after it had been felt, and right.

    Who asks after the first failure is served by the next incarnation, or by the next context.
    """
    fates = load.fates[first:]
    felt = next((fate.ended for fate in fates if not fate.is_completed), None)
    if felt is None:
        return None
    served = (
        number
        for number, fate in enumerate(fates)
        if fate.begun >= felt and fate.error is not None and fate.error <= load.products.limit
    )
    return next(served, None)
