"""The faults of ``demo recover``, one after the other under load, and how long each was felt."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


@attrs.frozen(kw_only=True)
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


def _crash(device: ta.Device) -> None:
    ta.testing.inject_fault(device, ta.linalg.Matmul, fail=RuntimeError(REASON))


def _poison(device: ta.Device) -> None:
    ta.testing.poison(device, REASON)


def _trap(device: ta.Device) -> None:
    ta.testing.inject_fault(device, ta.linalg.Matmul, poison=True, how="trap")


def _assert(device: ta.Device) -> None:
    ta.testing.inject_fault(device, ta.linalg.Matmul, poison=True, how="assert")


def _kill(device: ta.Device) -> None:
    ta.testing.inject_fault(device, ta.linalg.Matmul, kill=True, how="writing")


def _hang(device: ta.Device) -> None:
    ta.testing.inject_fault(device, ta.linalg.Matmul, hang=True, how="kernel")


def faults_of(device: ta.Device, isolation: Isolation) -> Sequence[Fault]:
    """The faults that a device in this isolation can survive, the mildest first."""
    crash = Fault(name="crash", text="crash of the BLAS actor", losses=0, inject=_crash)
    poison = Fault(name="poison", text="poison of the context", losses=1, inject=_poison)
    if isolation == "inline":
        # There the worker is this process.
        return crash, poison
    trap = Fault(name="trap", text="trap in a kernel", losses=1, inject=_trap)
    failed = Fault(name="assert", text="failed assertion in a kernel", losses=1, inject=_assert)
    kill = Fault(name="kill", text="SIGKILL to the worker process", losses=1, inject=_kill)
    limit = device.options.stuck_after
    hang = Fault(name="hang", text=f"hang, given up after {limit or 0:g} s", losses=1, inject=_hang)
    # Without kernels they are the same as the poison.
    of_kernels = () if device.info.backend == "cpu" else (trap, failed)
    # Without a limit a hung operation is waited for.
    return crash, poison, *of_kernels, kill, *(() if limit is None else (hang,))


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
