"""Clients count while workers are killed and the program is made again: each call has one outcome."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from random import Random

import attrs
import numpy as np
import pytest
import trio
from reset_programs import Tally

import trio_accel as ta
from trio_accel.programs import Program
from trio_accel.testing import inject_fault

CLIENTS, CALLS, GAP = 8, 40, 1e6
LOST = (ta.ContextLostError, ta.InputFailedError, ta.StaleRefError)


@attrs.define(eq=False)
class Attack:
    """The counts, and their model: each reset starts far above all counts before it."""

    device: ta.Device
    program: Program[Tally]
    random: Random
    starts: list[float] = attrs.field(factory=lambda: [0.0])
    answers: list[float] = attrs.Factory(list)
    restoring: trio.Lock = attrs.Factory(trio.Lock)
    done: trio.Event = attrs.Factory(trio.Event)

    async def reset(self) -> None:
        start = GAP * len(self.starts)
        await self.program.reset(counts=np.full(1, start))
        self.starts.append(start)

    async def restore(self) -> None:
        async with self.restoring:
            while self.program.is_damaged:
                with suppress(ta.ContextLostError):
                    await self.reset()

    async def client(self) -> None:
        for _ in range(CALLS):
            self.answers.append(await self.read(await self.add()))

    async def add(self) -> ta.AccelRef:
        while True:
            try:
                before: ta.AccelRef = await self.program.ask(Tally.add)
            except LOST:
                await self.restore()
            else:
                return before

    async def read(self, array: ta.AccelRef) -> float:
        while True:
            with suppress(ta.ContextLostError):
                return float(await array.to_host())

    async def attack(self) -> None:
        while not self.done.is_set():
            for _ in range(self.random.randrange(60)):
                await trio.lowlevel.checkpoint()
            choice = self.random.random()
            if choice < 0.4:
                inject_fault(self.device, self.program.operation(Tally.add), kill=True)
            elif choice < 0.7:
                pid = (await self.device.statistics()).pid
                assert pid is not None
                # Another fault may have ended it by now.
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            else:
                async with self.restoring:
                    with suppress(ta.ContextLostError):
                        await self.reset()
            with trio.move_on_after(self.random.random() * 0.05):
                await self.done.wait()

    async def run(self) -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.attack)
                async with trio.open_nursery() as clients:
                    for _ in range(CLIENTS):
                        clients.start_soon(self.client)
                self.done.set()
        # The last fault may be one of theirs.
        self.answers.append(await self.read(await self.add()))

    def check(self) -> None:
        assert len(self.answers) == CLIENTS * CALLS + 1
        assert len(self.starts) > 1
        for start in self.starts:
            counted = sorted(answer - start for answer in self.answers if start <= answer < start + GAP)
            # Each call with an answer was counted once, and none of those that failed.
            assert counted == list(range(len(counted)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("retry", [0, 1])
async def test_the_counter_is_that_of_the_model(system: ta.System, seed: int, retry: int) -> None:
    often, at_once = ta.Intensity(10_000, 60.0), ta.Backoff(base=0.0, maximum=0.0)
    options = ta.DeviceOptions(isolation="process", intensity=often, backoff=at_once, retry=retry)
    async with (
        system.open_device("cpu", options=options) as device,
        ta.open_program(device, Tally, np.zeros(1), factors={"a": np.ones(1)}) as program,
    ):
        attack = Attack(device, program, Random(seed))
        await attack.run()
        attack.check()
