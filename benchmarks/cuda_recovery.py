"""How soon a CUDA device computes again after a fault."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import trio

import trio_accel as ta

from ._cuda_stand import SIZE, on_cuda, one_row, opened
from ._harness import Figure, Goal, Plan, Result
from ._stand import Stand

__all__ = ["BENCHMARKS"]

_ROUNDS = 20
_STUCK_AFTER = 0.5
# Bytes of 64 arrays that outlive every fault, powers of two in turn: 1 MiB to 1 GiB, 10.5 GiB together.
_HELD = tuple(1 << (20 + number % 11) for number in range(64))
# Until the next spare stands ready.
_PAUSE = 1.5
_OFTEN = ta.Intensity(10_000, 60.0)
_AT_ONCE = ta.Backoff(initial=0.0, base=0.0, jitter=0.0)


@attrs.frozen(kw_only=True)
class Fault:
    """A fault, and the bound for what follows.

    Attributes:
        name: Ending of the row.
        fault: What is injected.
        spares: Workers that stand ready.
        most: Milliseconds from when the asker hears of it to a right product.
    """

    name: str
    fault: dict[str, Any]
    spares: int = 0
    most: float = 600.0


_FAULTS = (
    Fault(name="illegal-address", fault={"poison": True}),
    Fault(name="trap", fault={"poison": True, "how": "trap"}),
    Fault(name="assert", fault={"poison": True, "how": "assert"}),
    Fault(name="killed-writing", fault={"kill": True, "how": "writing"}),
    Fault(name="endless", fault={"hang": True, "how": "kernel"}),
    Fault(name="illegal-address-spare", fault={"poison": True}, spares=1, most=10.0),
    Fault(name="killed-writing-spare", fault={"kill": True, "how": "writing"}, spares=1, most=150.0),
)


async def recovery(stand: Stand) -> tuple[Result, ...]:
    """From the error of the request in flight to the right product of the next, float32 of 512; no peer.

    20 rounds of each fault: kernels that write to an illegal address, trap, fail an assertion or do not end,
    and a worker that is killed while one writes; some with a spare. Meanwhile 64 arrays of 1 MiB to 1 GiB
    live, which each new context has to map.
    """
    await trio.lowlevel.checkpoint()
    return tuple([await _rounds(fault, stand.name("cuda.recovery"), stand.plan) for fault in _FAULTS])


async def _rounds(fault: Fault, name: str, plan: Plan) -> Result:
    options = ta.DeviceOptions(
        isolation="process",
        spares=fault.spares,
        intensity=_OFTEN,
        backoff=_AT_ONCE,
        stuck_after=_STUCK_AFTER if "hang" in fault.fault else None,
    )
    rounds, took = max(2, plan.count(_ROUNDS)), list[float]()
    host = np.random.default_rng(1).integers(-9, 9, (SIZE, SIZE)).astype(np.float32)
    async with opened(plan, options) as device:
        held = [await device.empty((plan.count(nbytes),), np.uint8) for nbytes in _HELD]
        a, right = await device.put(host), host @ host
        for number in range(rounds):
            plan.watch(number, rounds)
            await _multiply(a, right)
            if fault.spares:
                await trio.sleep(_PAUSE)
            took.append(await _round(device, fault, a, right))
        del held
    goal = Goal(figure=Figure.OURS, most=fault.most)
    return one_row(f"{name}-{fault.name}", took, "ms", goal)


async def _round(device: ta.Device, fault: Fault, a: ta.AccelRef, right: npt.NDArray[np.float32]) -> float:
    ta.testing.inject_fault(device, ta.linalg.Nrm2, **fault.fault)
    try:
        await device.ask(ta.linalg.Nrm2(np.ones(4)))
    except (ta.ContextLostError, ta.CompletionTimeoutError):
        seen = trio.current_time()
        return (await _multiply(a, right) - seen) * 1e3
    raise RuntimeError(f"{fault.name}: the fault was not felt")


async def _multiply(a: ta.AccelRef, right: npt.NDArray[np.float32]) -> float:
    """Multiply, and see that the product is right; returns when it came.

    Sums of small whole numbers are exact.
    """
    product = await (await ta.linalg.matmul(a, a)).to_host()
    at = trio.current_time()
    if not np.array_equal(product, right):
        raise RuntimeError("a product after a fault is wrong")
    return at


BENCHMARKS = on_cuda("cuda.recovery", recovery, isolations=("process",))
