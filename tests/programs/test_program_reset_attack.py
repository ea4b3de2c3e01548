"""Clients count in an array while workers are killed and the program is made anew: every call has one outcome."""

from __future__ import annotations

import os
import signal
from random import Random

import numpy as np
import pytest
import trio
from reset_programs import Tally

import trio_accel as ta
from trio_accel.testing import inject_fault

CLIENTS, CALLS, GAP = 8, 40, 1e6


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("retry", [0, 1])
async def test_the_counter_is_that_of_the_model(system: ta.System, seed: int, retry: int) -> None:
    random = Random(seed)
    often, at_once = ta.Intensity(10_000, 60.0), ta.Backoff(base=0.0, maximum=0.0)
    options = ta.DeviceOptions(isolation="process", intensity=often, backoff=at_once, retry=retry)
    # Each reset starts far above all before it, so that an answer tells which state it was counted in.
    starts, answers, failed = [0.0], list[float](), 0
    restoring, done = trio.Lock(), trio.Event()
    async with (
        system.open_device("cpu", options=options) as device,
        ta.open_program(device, Tally, np.zeros(1), factors={"a": np.ones(1)}) as program,
    ):

        async def reset() -> None:
            start = GAP * len(starts)
            await program.reset(counts=np.full(1, start))
            starts.append(start)

        async def client() -> None:
            nonlocal failed
            left = CALLS
            while left:
                try:
                    before = await program.ask(Tally.add)
                except (ta.ContextPoisonedError, ta.InputFailedError, ta.StaleRefError):
                    failed += 1
                    async with restoring:
                        if program.is_damaged:
                            with_loss = True
                            while with_loss:
                                try:
                                    await reset()
                                    with_loss = False
                                except ta.ContextPoisonedError:
                                    pass
                    continue
                left -= 1
                while True:
                    try:
                        answers.append(float(await before.to_host()))
                        break
                    except ta.ContextPoisonedError:
                        pass

        async def attack() -> None:
            while not done.is_set():
                for _ in range(random.randrange(60)):
                    await trio.lowlevel.checkpoint()
                choice = random.random()
                if choice < 0.4:
                    inject_fault(device, program.operation(Tally.add), kill=True)
                elif choice < 0.7:
                    os.kill((await device.statistics()).pid, signal.SIGKILL)
                else:
                    async with restoring:
                        try:
                            await reset()
                        except ta.ContextPoisonedError:
                            pass
                with trio.move_on_after(random.random() * 0.05):
                    await done.wait()

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(attack)
                async with trio.open_nursery() as clients:
                    for _ in range(CLIENTS):
                        clients.start_soon(client)
                done.set()
            if program.is_damaged:
                await reset()
            last = float((await program.ask(Tally.about))["counts"])
    # Each call that has an answer was counted once, in one state, and no call that failed in any.
    assert len(answers) == CLIENTS * CALLS
    assert len(starts) > 1
    for start in starts:
        counted = sorted(answer - start for answer in answers if start <= answer < start + GAP)
        assert counted == list(range(len(counted)))
    assert last - starts[-1] == sum(answer >= starts[-1] for answer in answers)
