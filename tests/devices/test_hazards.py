"""Work on the same arrays is ordered, whichever streams it is on and however these move."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import scipy.sparse
import trio
from chosen import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st
from manual_backend import ManualBackend, ManualEvent, ManualStream
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.devices.engine._in_flight import MemoryInUse

pytestmark = pytest.mark.conformance

LENGTH = 8
ARRAYS = 3
MATRIX: Any = scipy.sparse.random_array((LENGTH, LENGTH), density=0.4, rng=np.random.default_rng(1)).astype(
    complex
)

Vectors = list[npt.NDArray[np.complex128]]


@attrs.frozen
class Step:
    """One operation of a random program on a few vectors."""

    kind: str
    i: int
    j: int
    value: float

    def serial(self, vectors: Vectors) -> npt.NDArray[np.complex128] | None:
        """Compute it with NumPy, and return the values read to the host."""
        x, y = vectors[self.i], vectors[self.j]
        match self.kind:
            case "fill":
                y[:] = self.value
            case "scal":
                y *= self.value
            case "axpy":
                y += self.value * x
            case "fft":
                y[:] = np.fft.fft(x, norm="ortho")
            case "spmv":
                y[:] = MATRIX @ x
            case "to_host":
                return x.copy()
            case _:
                raise AssertionError(self.kind)
        return None

    def ask(self, refs: list[ta.AccelRef], matrix: ta.sparse.CsrMatrix) -> Coroutine[Any, Any, object]:
        """Ask the device for it."""
        x, y = refs[self.i], refs[self.j]
        asks: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "fill": lambda: y.fill(self.value),  # memory
            "scal": lambda: ta.linalg.scal(self.value, y),  # blas
            "axpy": lambda: ta.linalg.axpy(self.value, x, y),
            "fft": lambda: ta.fft.fft(x, norm="ortho", out=y),  # fft
            "spmv": lambda: ta.sparse.spmv(matrix, x, out=y),  # sparse
            "to_host": x.to_host,
        }
        return asks[self.kind]()


@st.composite
def steps(draw: st.DrawFn) -> Step:
    i, j = draw(st.permutations(range(ARRAYS)))[:2]
    kind = draw(st.sampled_from(["fill", "scal", "axpy", "fft", "spmv", "to_host"]))
    return Step(kind, i, j, draw(st.sampled_from([-1.0, 0.5, 2.0])))


async def run(
    device: ta.Device, program: list[Step], *, hold: Callable[[], None], move: Callable[[], None]
) -> None:
    """Ask for all steps at once, in order; let the streams move; compare with the serial program."""
    generator = np.random.default_rng(len(program))
    vectors = [generator.normal(size=LENGTH).astype(complex) for _ in range(ARRAYS)]
    refs = [await device.put(vector) for vector in vectors]
    matrix = await ta.sparse.csr(device, MATRIX)
    for kind in ("scal", "fft", "spmv"):  # opens the libraries
        await Step(kind, 0, 1, 1.0).ask([*refs[:1], await device.put(vectors[0])], matrix)
    seen: dict[int, object] = {}

    async def ask(place: int, step: Step) -> None:
        seen[place] = await step.ask(refs, matrix)

    hold()
    async with trio.open_nursery() as nursery:
        for place, step in enumerate(program):
            nursery.start_soon(ask, place, step)
            # Each is launched before the next is asked for, and none is waited for.
            await wait_all_tasks_blocked()
        move()
    for place, step in enumerate(program):
        expected = step.serial(vectors)
        if expected is not None:
            np.testing.assert_allclose(np.asarray(seen[place]), expected, rtol=1e-12, atol=1e-12)
    for ref, vector in zip(refs, vectors, strict=True):
        np.testing.assert_allclose(await ref.to_host(), vector, rtol=1e-12, atol=1e-12)


async def run_by_hand(program: list[Step], order: random.Random) -> None:
    backend = ManualBackend()
    backend.may_open.set()

    def hold() -> None:
        backend.device.is_held = True

    def move() -> None:
        streams = list(backend.device.streams)
        while any(stream.items for stream in streams):
            # One step of any stream at a time; a stream that waits for another does nothing.
            if not order.choice(streams).step():
                assert any(stream.step() for stream in streams), "the streams wait in a circle"
        backend.device.is_held = False

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            "trio_accel.devices.front._system.candidates", lambda spec: ((backend, backend.info),)
        )
        monkeypatch.setattr(trio.to_thread, "run_sync", backend.run_sync)
        # No grace, because a failing program must not wait for held streams.
        options = ta.DeviceOptions(cancel_grace=0.0)
        async with ta.open_system("test") as system, system.open_device(options=options) as device:
            await run(device, program, hold=hold, move=move)


@given(program=st.lists(steps(), min_size=1, max_size=25), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_random_programs_equal_the_serial_result_in_any_order_of_the_streams(
    program: list[Step], seed: int
) -> None:
    trio.run(run_by_hand, program, random.Random(seed))


STREAMS = [ta.SingleStream(), ta.StreamPool(2), ta.StreamPool(3), ta.PerActorStreams()]


@pytest.mark.parametrize("streams", STREAMS, ids=["1 stream", "2 streams", "3 streams", "4 streams"])
async def test_random_programs_on_real_streams(
    system: ta.System, isolation: Isolation, streams: ta.StreamPool
) -> None:
    options = ta.DeviceOptions(isolation=isolation, streams=streams)
    async with system.open_device(BACKEND, options=options) as device:

        async def run_here(program: list[Step]) -> None:
            await run(device, program, hold=lambda: None, move=lambda: None)

        # All examples use the one device: each is run from the thread of the search for them.
        @given(program=st.lists(steps(), min_size=1, max_size=25))
        @settings(max_examples=60, deadline=None, derandomize=True)
        def search(program: list[Step]) -> None:
            trio.from_thread.run(run_here, program)

        await trio.to_thread.run_sync(search)
        assert device.generation == 1


async def test_readers_do_not_wait_for_each_other(
    manual: ta.Device, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    x = await manual.put(np.ones(LENGTH, complex))
    matrix = await ta.sparse.csr(manual, MATRIX)
    await ta.linalg.dot(x, x)
    await ta.fft.fft(x)
    await ta.sparse.spmv(matrix, x)
    device = backend.device
    assert all(stream.waits == 0 for stream in device.streams)  # finished work needs no waiting
    device.is_held = True
    for ask in (ta.linalg.nrm2, ta.fft.fft, lambda x: ta.sparse.spmv(matrix, x), lambda x: x.to_host()):
        nursery.start_soon(ask, x)
    await wait_all_tasks_blocked()
    assert all(stream.waits == 0 for stream in device.streams)
    nursery.start_soon(ta.linalg.scal, 2.0, x)
    await wait_all_tasks_blocked()
    assert device.stream("blas").waits == 3  # for the readers on the other streams
    nursery.start_soon(ta.fft.fft, x)
    await wait_all_tasks_blocked()
    assert device.stream("fft").waits == 1  # only for the writer
    device.release()


async def test_a_host_operand_is_copied_on_the_stream_that_uses_it(
    manual: ta.Device, backend: ManualBackend
) -> None:
    x = await manual.put(np.eye(2))
    before = len(backend.device.streams)
    await ta.linalg.matmul(x, np.ones((2, 2)))
    assert len(backend.device.streams) == before + 1
    assert all(stream.waits == 0 for stream in backend.device.streams)


class TestUses:
    def setup_method(self) -> None:
        self.device: Any = type("Device", (), {"is_held": True, "validated_blocks": ()})()
        self.streams = [ManualStream(f"stream {number}", self.device) for number in range(3)]
        self.memory = MemoryInUse(self.device)

    def launch(
        self, stream: int, *, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()
    ) -> ManualEvent:
        return self.use(self.streams[stream], reads, writes)

    def use(self, stream: ManualStream, reads: tuple[int, ...], writes: tuple[int, ...]) -> ManualEvent:
        self.memory.order(stream, reads, writes)
        event = stream.record()
        for block in reads:
            self.memory.uses[block].read(stream, event)
        for block in writes:
            self.memory.uses[block].write(stream, event)
        return event

    def waits(self) -> list[int]:
        return [stream.waits for stream in self.streams]

    def test_read_after_write(self) -> None:
        self.launch(0, writes=(1,))
        self.launch(1, reads=(1,))
        assert self.waits() == [0, 1, 0]

    def test_write_after_write_and_read(self) -> None:
        self.launch(0, writes=(1,))
        self.launch(1, reads=(1,))
        self.launch(2, writes=(1,))
        assert self.waits() == [0, 1, 2]

    def test_one_stream_needs_no_waiting(self) -> None:
        for _ in range(3):
            self.launch(0, reads=(1,), writes=(1,))
        assert self.waits() == [0, 0, 0]

    def test_finished_work_is_not_waited_for(self) -> None:
        self.launch(0, writes=(1,)).is_done = True
        self.launch(1, reads=(1,))
        assert self.waits() == [0, 0, 0]

    def test_other_blocks_do_not_matter(self) -> None:
        self.launch(0, writes=(1,))
        self.launch(1, reads=(2,), writes=(3,))
        assert self.waits() == [0, 0, 0]

    def test_a_block_read_by_many_streams_keeps_no_record_of_finished_reads(self) -> None:
        for _ in range(50):
            stream = ManualStream("one of many", self.device)
            self.use(stream, (1,), ()).is_done = True
        assert len(self.memory.uses[1].reads or ()) == 1

    def test_a_freed_block_is_forgotten(self) -> None:
        self.device.allocate = self.device.free = lambda *_: None
        self.memory.allocate([(1, 8)], lambda: None)
        self.launch(0, writes=(1,))
        self.memory.release(1)
        self.memory.release(2)
        self.launch(1, reads=(1,))
        assert self.waits() == [0, 0, 0]
        assert not self.memory.uses[1].last_write
