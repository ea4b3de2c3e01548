"""Random operations and chains, with the results that a program has read."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
import trio
from chain_programs import STEPS
from chosen import BACKEND, INLINE, IS_STAND_IN
from replayed_programs import Scaler

import trio_accel as ta
from trio_accel import replay
from trio_accel.backends.base import Isolation

N = 4
Host = npt.NDArray[Any]
KINDS = [kind for kind in STEPS if not (IS_STAND_IN and kind == "solve")]


class Work:
    """Operations of every sort on the arrays of one task.

    Args:
        device: The device.
        seed: Seed of the random numbers.

    Attributes:
        read: The bytes that the program has read.
    """

    def __init__(self, device: ta.Device, seed: int) -> None:
        self.read: list[bytes] = []
        self._device = device
        self._draw = np.random.default_rng(seed)
        self._values: list[Any] = []
        self._leaves: dict[str, Any] = {}
        self._generator = ta.random.Generator(device, seed=seed)

        def step(x: Any, y: Any) -> Any:
            return ta.arrays.softmax(ta.nn.relu(x @ y) + y, axis=1).to_host()

        self._step = ta.step(step)

    async def run(self, count: int, kills: int = 0) -> None:
        """Do this much work, and kill the worker meanwhile."""
        device = self._device
        self._values = [await device.put(self._host()) for _ in range(3)]
        parts = await device.put(np.zeros((2 * N, N)))
        self._leaves = {"whole": await device.put(self._host()), "part": parts[1 : 2 * N : 2]}
        matrix = scipy.sparse.random(N, N, 0.5, format="csr", rng=self._draw)
        sparse = await ta.sparse.csr(device, matrix)
        graph = await ta.graphs.capture(device, ta.linalg.matmul, *self._values[:2])
        factors = await device.put(self._host())
        async with ta.open_program(device, Scaler, factors) as program:
            kinds: list[Callable[[], Awaitable[Any]]] = [
                lambda: ta.fft.fft(self._value()),
                lambda: self._generator.normal((N, N)),
                lambda: ta.sparse.spmm(sparse, self._value()),
                lambda: ta.linalg.qr(self._value()),
                lambda: graph(self._value(), self._value()),
                lambda: program.ask(Scaler.scaled, self._value()),
                lambda: program.ask(Scaler.grow, 0.5),
                lambda: self._rows(program),
                lambda: self._value().assign(self._host()),
                lambda: self._value().fill(float(self._draw.standard_normal())),
                lambda: ta.linalg.scal(0.5, self._value()),
                lambda: ta.arrays.add(self._value(), 1.0, out=self._leaves["part"]),
                lambda: self._step(self._value(), self._value()),
                self._submitted,
                self._large,
                *[self._chain] * 12,
            ]
            for number in range(count):
                if kills and number % (count // kills) == 3:
                    await self._kill()
                await self._note(await kinds[int(self._draw.integers(len(kinds)))]())

    def _host(self) -> Host:
        return self._draw.uniform(0.5, 1.5, (N, N))

    def _value(self) -> Any:
        return self._values[int(self._draw.integers(len(self._values)))]

    async def _note(self, found: Any) -> None:
        for each in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(each, ta.AccelRef):
                if self._draw.random() < 0.5:
                    self.read.append((await each.to_host()).tobytes())
                is_like = each.shape == (N, N) and each.dtype is ta.DType.float64
                if is_like and each.spec.is_contiguous:
                    self._values = [*self._values[-5:], each]
            elif each is not None:
                self.read.append(np.asarray(each).tobytes())

    async def _chain(self) -> Any:
        """Await one expression of some steps; some cannot be computed."""
        with suppress(ta.AccelError, TypeError, ValueError):
            return await self._expression()

    async def _expression(self) -> Any:
        value = self._value()
        for kind in self._draw.choice(KINDS, int(self._draw.integers(1, 6))):
            value = STEPS[kind](value, self._value(), float(self._draw.uniform(0.5, 2.0)), self._leaves)
            if not isinstance(value, ta.Call):
                value = +value
            if value.shape != (N, N):
                return await value.to_host()
        if self._draw.random() < 0.5:
            return await value.to_host()
        return await value.cast("float64")

    async def _submitted(self) -> Any:
        pending = ta.linalg.matmul(self._value(), self._value()).start()
        more = ta.linalg.scal(2.0, pending.value).start()
        await more.wait()
        return pending.value

    async def _kill(self) -> None:
        ta.testing.inject_fault(self._device, ta.linalg.Matmul, kill=True)
        await self._note(await ta.linalg.matmul(*self._values[:2]))

    async def _large(self) -> Any:
        """Numbers of more than 1 MiB in and out."""
        host = np.full((160, 1024), float(self._draw.random()))
        return await (await self._device.put(host) * 2.0).to_host()

    async def _rows(self, program: Any) -> Any:
        async with program.stream(Scaler.rows, self._value()) as rows:
            return [row async for row in rows]


async def recorded(
    system: ta.System, isolation: Isolation, tasks: int, count: int, *, kills: int = 0, **options: Any
) -> tuple[replay.MemoryJournal, list[bytes], ta.Device]:
    """Record the work of tasks on a device; returns the journal, the read arrays, and the device."""
    journal = replay.MemoryJournal()
    made: list[Work] = []
    kept = ta.DeviceOptions(isolation=isolation, **options)
    async with (
        system.open_device(BACKEND, options=kept) as device,
        replay.record(device, journal),
        trio.open_nursery() as nursery,
    ):
        for seed in range(tasks):
            made.append(work := Work(device, seed))
            nursery.start_soon(work.run, count // tasks, kills)
    return journal, [each for work in made for each in work.read], device


async def replayed(
    system: ta.System, journal: replay.RecordingJournal, isolation: Isolation
) -> replay.Report:
    """Replay a journal on a device of its own, which is empty in the end."""
    options = ta.DeviceOptions(isolation=isolation) if isolation == "process" else INLINE
    async with system.open_device(BACKEND, options=options) as device:
        report = await replay.replay(journal, device, programs=True)
        gc.collect()
        await device.synchronize()
        assert (await device.statistics()).memory.blocks == 0
    return report
