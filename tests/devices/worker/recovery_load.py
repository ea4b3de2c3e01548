"""A load of which every request's outcome is known, whatever the worker that serves it dies of.

The first operation on each stream is held back, so that at the moment of the death each library has
begun with exactly as many as its window admits, and with none of those after them.
"""

from __future__ import annotations

import enum
import hashlib
import os
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import trio
import trio.testing
from processes import wait_dead

import trio_accel as ta
from trio_accel.backends.base import function_of
from trio_accel.devices import Copy, Operation, Put, ToHost

AT_ONCE = ta.Backoff(initial=0.0, base=0.0, jitter=0.0)
MANY = ta.Intensity(100, 60.0)
IN_FLIGHT = 20
SIZE = 220

BLAS = "trio_accel.linalg:BlasActor"
FFT = "trio_accel.fft:FftActor"
MEMORY = "trio_accel.devices:MemoryActor"

TRIGGER = ta.random.Bits(1, 0, (4,))

# The first work of each library when the worker dies.
BEGUN = {BLAS: 20, MEMORY: 20, FFT: 12}

_SMALL = 16
_LARGE = 1 << 17  # of float64: 1 MiB, which the application copies through shared memory
_WIDTH = 256


class Outcome(enum.Enum):
    """The required outcome of a request."""

    RIGHT = "runs, once, and its result is right"
    IN_FLIGHT = "was in flight"
    INPUT_FAILED = "uses what was to be made by one in flight"


@attrs.define(eq=False)
class Sent:
    """A request and its outcome.

    Attributes:
        kind: Which of the five.
        operation: Its name.
        required: The required outcome.
        expected: Its result.
        producer: The operation in flight that makes its input.
        outcome: Its reply or its error.
        at: The time of its outcome.
    """

    kind: str
    operation: str
    required: Outcome
    expected: npt.NDArray[Any] | None = None
    producer: str = ""
    outcome: object = None
    at: float = 0.0

    async def check(self, lost: type[ta.ContextLostError], *, stuck: bool) -> None:
        """Compare with the required outcome.

        Args:
            lost: The error class of requests in flight.
            stuck: Whether the request was hung.
        """
        outcome = self.outcome
        if self.required is Outcome.RIGHT:
            assert not isinstance(outcome, BaseException), (self, outcome)
            found = await outcome.to_host() if isinstance(outcome, ta.AccelRef) else outcome
            if self.expected is not None and self.operation == "fft.Fft":
                # The device's library rounds in its own way.
                bound = 1e-12 * np.abs(self.expected).max()
                np.testing.assert_allclose(found, self.expected, rtol=0, atol=bound)
            elif self.expected is not None:
                np.testing.assert_array_equal(found, self.expected)
        elif self.required is Outcome.IN_FLIGHT:
            wanted = ta.CompletionTimeoutError if stuck else lost
            assert type(outcome) is wanted, (self, outcome)
            assert outcome.operation == self.operation
        else:
            assert type(outcome) is ta.InputFailedError, (self, outcome)
            assert function_of(self.producer) in str(outcome)
            cause = outcome.__cause__
            assert type(cause) in (lost, ta.CompletionTimeoutError), (self, cause)
            assert cause.operation == self.producer


@attrs.define(eq=False)
class Base:
    """Arrays that every round reads and none writes.

    Attributes:
        device: The device of the round.
        bystander: Memory that nothing uses.
        digest: The digest of the contents.
        hosts: The contents of `refs`.
        refs: Arrays to read.
    """

    device: ta.Device
    bystander: ta.AccelRef
    digest: str
    hosts: dict[str, npt.NDArray[Any]]
    refs: dict[str, ta.AccelRef]

    @classmethod
    async def make(cls, device: ta.Device, nbytes: int) -> Base:
        rng = np.random.default_rng(3)
        bystander = await device.put(np.arange(nbytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        hosts = {
            "ones": np.ones(_SMALL),
            "left": rng.integers(-9, 9, (_SMALL, _SMALL)).astype(complex),
            "right": rng.integers(-9, 9, (_SMALL, _SMALL)).astype(complex),
            "signal": rng.standard_normal(_SMALL) + 1j,
            "small": rng.standard_normal(_SMALL),
            "large": rng.standard_normal(_LARGE),
            "a": rng.integers(-9, 9, (_WIDTH, _WIDTH)).astype(np.float32),
            "b": rng.integers(-9, 9, (_WIDTH, _WIDTH)).astype(np.float32),
        }
        refs = {name: await device.put(host) for name, host in hosts.items()}
        return cls(device, bystander, await _digest(bystander), hosts, refs)

    async def gemm(self) -> None:
        """Multiply, and see that the product is right."""
        product = await self.device.ask(ta.linalg.Matmul(self.refs["a"], self.refs["b"]))
        np.testing.assert_array_equal(await product.to_host(), self.hosts["a"] @ self.hosts["b"])

    async def warm(self) -> None:
        """Ask for one of each kind: NVIDIA's libraries load what they need first only when nothing runs."""
        device, refs, hosts = self.device, self.refs, self.hosts
        for name in ("small", "large"):
            await (await device.ask(Copy(await device.put(hosts[name])))).to_host()
        for operation in (
            ta.linalg.Scal(1.0, refs["ones"]),
            ta.linalg.Axpy(0.0, hosts["ones"], refs["ones"]),
            ta.linalg.Dot(refs["ones"], refs["ones"]),
            ta.linalg.Matmul(refs["a"], refs["b"]),
            ta.fft.Fft(refs["signal"]),
            # Triggers the fault, on a stream of its own.
            TRIGGER,
        ):
            await device.ask(operation)
        await device.ask(ta.fft.Fft(await device.ask(ta.linalg.Matmul(refs["left"], refs["right"]))))

    async def check(self) -> None:
        """Nothing of it has changed."""
        assert await _digest(self.bystander) == self.digest
        for name, ref in self.refs.items():
            np.testing.assert_array_equal(await ref.to_host(), self.hosts[name])


async def _digest(ref: ta.AccelRef) -> str:
    host = await ref.to_host()
    return await trio.to_thread.run_sync(lambda: hashlib.sha1(host).hexdigest())


@attrs.define(eq=False)
class Load:
    """One round: 220 requests of five kinds.

    Attributes:
        base: The arrays they read.
        nursery: The nursery of the requests.
        heads: How the first of each stream is held.
        sent: All of them.
    """

    base: Base
    nursery: trio.Nursery
    heads: dict[str, Any]
    sent: list[Sent] = attrs.field(factory=list)
    invalid: list[ta.AccelRef] = attrs.field(factory=list)
    _waiting: int = 0
    _done: trio.Event = attrs.field(factory=trio.Event)

    @property
    def device(self) -> ta.Device:
        return self.base.device

    async def send(self) -> None:
        """Hand everything over, and wait until all that fits the windows has been begun."""
        ahead = [await self.device.put(np.ones(_SMALL)) for _ in range(8)]
        counters = [await self.device.put(np.full(_SMALL, float(number))) for number in range(15)]
        self.invalid = ahead
        ta.testing.inject_fault(self.device, ta.linalg.Scal, **self.heads)
        await self._blas(ahead, counters)
        ta.testing.inject_fault(self.device, Put, **self.heads)
        await self._memory()
        ta.testing.inject_fault(self.device, ta.fft.Fft, **self.heads)
        self._chains()
        assert len(self.sent) == SIZE
        await self.wait_begun()

    async def wait_begun(self) -> None:
        with trio.fail_after(60):
            while True:
                queues = (await self.device.statistics()).queues
                if {name: queue.in_flight for name, queue in queues.items() if queue.in_flight} == BEGUN:
                    return
                await trio.sleep(0.001)

    async def _blas(self, ahead: list[ta.AccelRef], counters: list[ta.AccelRef]) -> None:
        """44 in place and 44 of fresh output; the first 20 are in flight."""
        refs, hosts = self.base.refs, self.base.hosts
        for ref in ahead:
            await self._ask("in place", ta.linalg.Scal(2.0, ref), Outcome.IN_FLIGHT)
        for _ in range(12):
            await self._fresh(Outcome.IN_FLIGHT)
        for ref in ahead[:6]:
            operation = ta.linalg.Axpy(1.0, refs["ones"], ref)
            await self._ask("in place", operation, Outcome.INPUT_FAILED, producer="linalg.Scal")
        for ref in counters:
            await self._ask("in place", ta.linalg.Scal(2.0, ref), Outcome.RIGHT)
        for ref in ahead[6:]:
            operation = ta.linalg.Dot(ref, refs["ones"])
            await self._ask("fresh output", operation, Outcome.INPUT_FAILED, producer="linalg.Scal")
        for number, ref in enumerate(counters):
            # Lost or run twice, the update or the one before would show.
            expected = np.full(_SMALL, 2.0 * number + 1.0)
            operation = ta.linalg.Axpy(1.0, hosts["ones"] if number % 2 else refs["ones"], ref)
            await self._ask("in place", operation, Outcome.RIGHT, expected)
        for _ in range(30):
            await self._fresh(Outcome.RIGHT)

    async def _fresh(self, required: Outcome) -> None:
        refs, hosts = self.base.refs, self.base.hosts
        expected = hosts["left"] @ hosts["right"]
        await self._ask("fresh output", ta.linalg.Matmul(refs["left"], refs["right"]), required, expected)

    async def _memory(self) -> None:
        """44 to the device and 44 from it; the first 20 are in flight."""
        for number in range(10):
            await self._copies(number, Outcome.IN_FLIGHT)
        for number in range(34):
            await self._copies(number, Outcome.RIGHT)

    async def _copies(self, number: int, required: Outcome) -> None:
        name = "small" if number % 8 else "large"
        host, ref = self.base.hosts[name], self.base.refs[name]
        out = np.zeros_like(host) if number % 2 else None
        await self._ask("put", Put(host.copy()), required, host)
        await self._ask("to_host", ToHost(ref, out), required, host)

    def _chains(self) -> None:
        """44 submissions: of two operations, the first in flight or not, and of three."""
        refs, hosts = self.base.refs, self.base.hosts
        for number in range(12):
            first = self._submit(ta.fft.Fft(refs["signal"]), Outcome.IN_FLIGHT)
            self._submit(ta.linalg.Scal(2.0, first), Outcome.INPUT_FAILED, producer="fft.Fft")
            if number >= 8:
                self._submit(Copy(first), Outcome.INPUT_FAILED, producer="fft.Fft")
        product = hosts["left"] @ hosts["right"]
        for _ in range(8):
            first = self._submit(ta.linalg.Matmul(refs["left"], refs["right"]), Outcome.RIGHT, product)
            self._submit(ta.fft.Fft(first), Outcome.RIGHT, np.fft.fft(product))

    async def _ask(
        self,
        kind: str,
        operation: Operation[Any, Any],
        required: Outcome,
        expected: npt.NDArray[Any] | None = None,
        producer: str = "",
    ) -> None:
        sent = self._note(kind, operation, required, expected, producer)
        self.nursery.start_soon(self._run, sent, lambda: self.device.ask(operation))
        # It is handed over by the time that the next is: so the order is known.
        await trio.lowlevel.checkpoint()

    def _submit(
        self,
        operation: Operation[Any, ta.AccelRef],
        required: Outcome,
        expected: npt.NDArray[Any] | None = None,
        producer: str = "",
    ) -> ta.AccelRef:
        sent = self._note("submitted", operation, required, expected, producer)
        pending = self.device.submit(operation)
        self.nursery.start_soon(self._run, sent, pending.wait)
        return pending.value

    def _note(
        self,
        kind: str,
        operation: Operation[Any, Any],
        required: Outcome,
        expected: npt.NDArray[Any] | None,
        producer: str,
    ) -> Sent:
        sent = Sent(kind, operation.operation, required, expected, producer)
        self.sent.append(sent)
        self._waiting += 1
        return sent

    async def _run(self, sent: Sent, wait: Callable[[], Any]) -> None:
        try:
            outcome = await wait()
        except Exception as error:  # noqa: BLE001  # looked at when all have ended
            outcome = error
        assert sent.outcome is None
        sent.outcome, sent.at = outcome, trio.current_time()
        self._waiting -= 1
        if not self._waiting:
            self._done.set()

    async def check(self, lost: type[ta.ContextLostError], *, is_hang: bool) -> None:
        """Wait for all, and look what became of them."""
        await self._done.wait()
        hung = [sent for sent in self.sent if isinstance(sent.outcome, ta.CompletionTimeoutError)]
        assert len(hung) == is_hang
        for sent in self.sent:
            await sent.check(lost, stuck=sent in hung)
        heads = {sent.operation: sent for sent in reversed(self.sent) if sent.required is Outcome.IN_FLIGHT}
        # On each stream one hangs, and which of them is seen first is chance.
        assert all(sent is heads[sent.operation] for sent in hung)
        for ref in self.invalid:
            assert "damaged by linalg.Scal" in repr(ref)
        with pytest.raises(ta.StaleRefError, match=r"spoiled by linalg\.scal"):
            await self.invalid[0].to_host()

    def last_failure(self) -> float:
        """When the last of those in flight heard of it."""
        return max(sent.at for sent in self.sent if sent.required is Outcome.IN_FLIGHT)


@attrs.define
class Times:
    """The durations of rounds, in seconds.

    Attributes:
        errors: From the detection of the loss to the last error of the requests in flight.
        felt: To that error from when the worker was struck.
        gemms: From the moment when the loss was seen to a right product.
    """

    errors: list[float] = attrs.field(factory=list)
    felt: list[float] = attrs.field(factory=list)
    gemms: list[float] = attrs.field(factory=list)


async def wait_death(device: ta.Device) -> None:
    """Wait until the worker is dead."""
    pidfd = os.pidfd_open(device.dispatch.process.pid)
    try:
        await wait_dead(pidfd)
    finally:
        os.close(pidfd)


async def wait_loss(device: ta.Device) -> None:
    """Wait until the application knows that the context is lost; its worker may live on."""
    while device.state.availability.is_ready:
        await device.state.availability.wait_changed()


async def play(
    base: Base,
    times: Times,
    *,
    is_hang: bool,
    strike: Callable[[Load], Any],
    heads: dict[str, Any] | None = None,
    seen: Callable[[ta.Device], Any] = wait_death,
    lost: type[ta.ContextLostError] = ta.ContextLostError,
) -> None:
    """One round: hand over, strike, see who survives.

    Args:
        base: The array to read.
        times: Receives the durations.
        is_hang: The first operation never ends.
        strike: Makes the worker die, or hang.
        heads: The fate of the first operation on each stream.
        seen: Waits until the loss can be seen.
        lost: The error class of requests in flight.
    """
    device = base.device
    generation = device.generation
    at: list[float] = []

    async def watch() -> None:
        await seen(device)
        at.append(trio.current_time())
        await base.gemm()
        times.gemms.append(trio.current_time() - at[0])

    async with trio.open_nursery() as nursery:
        await base.warm()
        load = Load(base, nursery, heads or ({"hang": True} if is_hang else {"delay": 60.0}))
        await load.send()
        nursery.start_soon(watch)
        await trio.testing.wait_all_tasks_blocked()
        struck = trio.current_time()
        await strike(load)
        await load.check(lost, is_hang=is_hang)
    assert device.generation == generation + 1
    times.errors.append(max(0.0, load.last_failure() - at[0]))
    times.felt.append(load.last_failure() - struck)
    await base.check()
