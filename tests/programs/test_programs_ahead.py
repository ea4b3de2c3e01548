"""Spares, and the next worker, make programs before anybody asks them."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from noted_programs import Noted, Placed

import trio_accel as ta
from trio_accel.devices.dispatch._link import WorkerLink
from trio_accel.devices.dispatch._pool import WorkerPool

X = np.arange(5.0) + 3.0


class Notes:
    """The notes of programs, by process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, what: str) -> list[int]:
        path = self.folder / what
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def hold(self) -> Path:
        """Have constructors wait for `let_go`."""
        path = self.folder / "hold"
        os.mkfifo(path)
        return path

    async def let_go(self) -> None:
        """Let one constructor go that waits, and those to come."""
        path = self.folder / "hold"
        descriptor = await trio.to_thread.run_sync(os.open, path, os.O_WRONLY)
        path.unlink()
        os.close(descriptor)


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(tmp_path)


def options(**changes: Any) -> ta.DeviceOptions:
    """A worker that may be lost often, and is replaced without a back-off."""
    often = ta.Intensity(1000, 60.0)
    return ta.DeviceOptions(
        **{"isolation": "process", "intensity": often, "backoff": ta.Backoff(base=0.0), **changes}
    )


@pytest.fixture
def changes() -> dict[str, Any]:
    """Options of the `device` that differ from `options`."""
    return {"spares": 1}


@pytest.fixture
async def device(system: ta.System, changes: dict[str, Any]) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device("cpu", options=options(**changes)) as device:
        yield device


async def until(condition: Callable[[], object]) -> None:
    """Wait for an action of other processes that report it to nobody."""
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110  # there is nothing to wait for
            await trio.sleep(0.001)


def pool(device: ta.Device) -> WorkerPool:
    found: WorkerPool = device.dispatch._pool  # type: ignore[attr-defined]
    return found


def serving(device: ta.Device) -> int:
    """The process that serves."""
    pid: int = device.dispatch.process.pid  # type: ignore[attr-defined]
    return pid


def spares(device: ta.Device) -> set[int]:
    """The spare processes."""
    return {link.process.pid for link in pool(device)._spares}


async def replace(device: ta.Device) -> None:
    """Lose the worker, and wait until the next one serves."""
    generation = device.generation
    device.dispatch.process.kill()  # type: ignore[attr-defined]
    await until(lambda: device.generation > generation)


async def spare_with(device: ta.Device, notes: Notes, what: str = "warm") -> int:
    """The spare with a note of its program."""
    await until(lambda: spares(device) & set(notes.of(what)))
    (pid,) = spares(device)
    return pid


async def noted(device: ta.Device, notes: Notes, x: Any = X) -> ta.programs.Program[Noted]:
    return await ta.open_program(device, Noted, x, folder=str(notes.folder))


async def test_a_spare_makes_the_program_before_the_fault(device: ta.Device, notes: Notes) -> None:
    program = await noted(device, notes)
    for _ in range(3):
        spare = await spare_with(device, notes)
        await program.ask(Noted.add, 1.0)
        before = await program.ask(Noted.sum)
        made = len(notes.of("made"))
        await replace(device)
        assert serving(device) == spare
        # Writes since its construction are there, because it has the memory instead of a copy.
        assert await program.ask(Noted.sum) == before
        assert notes.of("made").count(spare) == 1
        assert notes.of("warm").count(spare) == 1
        assert made == len([pid for pid in notes.of("made") if pid not in spares(device)])
    assert before == X.sum() + 3 * X.size


@pytest.mark.parametrize("changes", [{"spares": 2}])
async def test_every_spare_makes_it(device: ta.Device, notes: Notes) -> None:
    program = await noted(device, notes)
    for _ in range(2):
        await until(lambda: len(spares(device)) == 2 and spares(device) <= set(notes.of("warm")))
        await replace(device)
        assert await program.ask(Noted.sum) == X.sum()
    # None has made it twice.
    assert len(set(notes.of("made"))) == len(notes.of("made"))


@pytest.mark.parametrize("changes", [{}])
async def test_the_next_worker_makes_it_unasked(device: ta.Device, notes: Notes) -> None:
    program = await noted(device, notes)
    for _ in range(2):
        await replace(device)
        await until(lambda: serving(device) in notes.of("warm"))
        assert await program.ask(Noted.sum) == X.sum()
        assert notes.of("made").count(serving(device)) == 1


async def test_a_closed_program_is_dropped_in_spares(device: ta.Device, notes: Notes) -> None:
    program = await noted(device, notes)
    spare = await spare_with(device, notes)
    await program.aclose()
    await until(lambda: spare in notes.of("gone"))
    other = await noted(device, notes, 2 * X)
    await until(lambda: notes.of("warm").count(spare) == 2)
    await replace(device)
    assert serving(device) == spare
    assert await other.ask(Noted.sum) == 2 * X.sum()
    assert notes.of("made").count(spare) == 2


async def test_a_program_is_closed_while_a_spare_makes_it(device: ta.Device, notes: Notes) -> None:
    await until(lambda: spares(device))
    (spare,) = spares(device)
    x = await device.put(np.ones(30 << 20))
    program = await noted(device, notes, x)
    await spare_with(device, notes)
    await replace(device)
    # The next spare hangs in the constructor.
    notes.hold()
    await until(lambda: spares(device) and spares(device) <= set(notes.of("made")))
    (spare,) = spares(device)
    assert await program.ask(Noted.sum) == 30 << 20
    await program.aclose()
    # The chunk ends with its arrays, although the spare reads in it.
    x.release()
    del x
    y = await device.put(np.full(20 << 20, 2.0))
    await device.synchronize()
    await notes.let_go()
    await until(lambda: spare in notes.of("gone"))
    assert spares(device) == {spare}
    await replace(device)
    assert serving(device) == spare
    assert float((await y.to_host()).sum()) == 40 << 20


@pytest.mark.slow
async def test_a_takeover_while_a_closed_program_is_made(device: ta.Device, notes: Notes) -> None:
    x = await device.put(np.ones(30 << 20))
    program = await noted(device, notes, x)
    await spare_with(device, notes)
    await replace(device)
    notes.hold()
    await until(lambda: spares(device) and spares(device) <= set(notes.of("made")))
    (spare,) = spares(device)
    await program.aclose()
    x.release()
    await device.synchronize()
    await replace(device)
    assert serving(device) == spare
    # New blocks lie in chunks that everybody knows.
    for _ in range(3):
        y = await device.put(np.full(20 << 20, 2.0))
        assert float((await y.to_host()).sum()) == 40 << 20
    await notes.let_go()
    await until(lambda: spare in notes.of("gone"))
    assert device.generation == 3


async def test_a_program_made_with_wrong_blocks_is_thrown_away(
    device: ta.Device, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await device.put(X + 100.0)
    x = await device.put(X)
    prepare = WorkerPool._prepare

    def mislead(self: WorkerPool, link: WorkerLink, library: str) -> None:
        blocks = self._chunks.blocks
        told = blocks.copy()
        place, wrong = blocks[x.spec.block], blocks[other.spec.block]
        blocks[x.spec.block] = (place[0], *wrong[1:])
        prepare(self, link, library)
        blocks.update(told)

    monkeypatch.setattr(WorkerPool, "_prepare", mislead)
    program = await noted(device, notes, x)
    spare = await spare_with(device, notes)
    await replace(device)
    assert serving(device) == spare
    assert await program.ask(Noted.told_first) == X[0]
    assert await program.ask(Noted.sum) == X.sum()
    assert notes.of("made").count(spare) == 2
    await until(lambda: spare in notes.of("gone"))


async def test_a_spare_is_killed_while_it_makes_the_program(device: ta.Device, notes: Notes) -> None:
    program = await noted(device, notes)
    await spare_with(device, notes)
    await replace(device)
    notes.hold()
    await until(lambda: spares(device) and spares(device) <= set(notes.of("made")))
    (spare,) = spares(device)
    os.kill(spare, 9)
    assert await program.ask(Noted.sum) == X.sum()
    (notes.folder / "hold").unlink()
    await until(lambda: spares(device) - {spare} and spares(device) <= set(notes.of("warm")))
    await replace(device)
    assert await program.ask(Noted.sum) == X.sum()
    assert device.generation == 3


async def test_a_takeover_waits_for_a_constructor_that_runs(
    device: ta.Device, notes: Notes, nursery: trio.Nursery
) -> None:
    program = await noted(device, notes)
    await spare_with(device, notes)
    await replace(device)
    notes.hold()
    await until(lambda: spares(device) and spares(device) <= set(notes.of("made")))
    (spare,) = spares(device)
    await replace(device)
    assert serving(device) == spare
    found: list[float] = []

    async def ask() -> None:
        found.append(await program.ask(Noted.sum))

    nursery.start_soon(ask)
    # Others do not wait for it.
    assert (await (await device.put(X)).to_host()).tolist() == X.tolist()
    assert not found
    await notes.let_go()
    await until(lambda: found)
    assert found == [X.sum()]
    assert notes.of("made").count(spare) == 1


async def test_a_constructor_fails_only_in_the_spare(
    device: ta.Device, notes: Notes, caplog: pytest.LogCaptureFixture
) -> None:
    program = await noted(device, notes)
    await spare_with(device, notes)
    await replace(device)
    (notes.folder / "refuse").touch()

    def warnings() -> list[logging.LogRecord]:
        return [record for record in caplog.records if "not opened ahead" in record.getMessage()]

    await until(lambda: spares(device) & set(notes.of("made")) and warnings())
    message = warnings()[0].getMessage()
    assert program.name in message
    assert "refused on purpose" in message
    assert await program.ask(Noted.sum) == X.sum()
    (spare,) = spares(device)
    # In use again, it was tried again.
    await until(lambda: notes.of("made").count(spare) == len(warnings()) == 2)
    (notes.folder / "refuse").unlink()
    await replace(device)
    assert serving(device) == spare
    # Asked, it is made again.
    assert await program.ask(Noted.sum) == X.sum()
    assert notes.of("made").count(spare) == 3


async def test_a_constructor_that_ends_the_spare_does_not_affect_the_device(
    device: ta.Device, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = await noted(device, notes)
    await spare_with(device, notes)
    notes.hold()
    await replace(device)
    for _ in range(3):
        await until(lambda: spares(device) and spares(device) <= set(notes.of("made")))
        (spare,) = spares(device)
        os.kill(spare, 11)
        await until(lambda gone=spare: gone not in spares(device))
        assert await program.ask(Noted.sum) == X.sum()
    (notes.folder / "hold").unlink()
    assert device.generation == 2


async def test_a_returned_array_is_not_read(device: ta.Device, notes: Notes) -> None:
    """Closed programs leave nothing behind in spares that others could meet."""
    for number in range(10):
        x = await device.put(X * number)
        program = await noted(device, notes, x)
        assert await program.ask(Noted.sum) == X.sum() * number
        await program.aclose()
        x.release()
    await until(lambda: spares(device))
    (spare,) = spares(device)
    await until(lambda: notes.of("gone").count(spare) == notes.of("made").count(spare))
    y = await device.put(X)
    program = await noted(device, notes, y)
    await replace(device)
    assert await program.ask(Noted.told_first) == X[0]


MODULE = """
import os
with open({log!r}, "a") as log:
    print(os.getpid(), file=log)
class Late:
    def __init__(self, x):
        self.x = x
    def sum(self):
        return float(self.x.sum())
"""


@pytest.mark.slow
@pytest.mark.own_launcher
async def test_the_module_of_a_program_is_preloaded(
    system: ta.System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    log = tmp_path / "log"
    (tmp_path / "late_program.py").write_text(MODULE.format(log=str(log)))
    late_program = importlib.import_module("late_program")
    async with system.open_device("cpu", options=options()) as device:
        program: Any = await ta.open_program(device, late_program.Late, X)
        launcher = os.getsid(serving(device))
        # In this process, in the worker, and in advance.
        await until(lambda: len(log.read_text().split()) == 3)
        assert str(launcher) not in log.read_text().split()
        opened = pool(device)._launcher
        await until(lambda: opened.ahead.judge("late_program") == ("fully", None))
        assert log.read_text().split()[:2] == [str(os.getpid()), str(serving(device))]
        await replace(device)
        assert await program.ask("sum") == X.sum()
    assert len(log.read_text().split()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"spares": 1, "retry": 1000}, {"spares": 2, "retry": 1000}])
async def test_programs_come_and_go_while_workers_do(device: ta.Device, notes: Notes) -> None:
    """Each answers for its own array, whatever was opened in advance for others in the meantime."""
    random = Random(device.options.spares)
    alive: list[tuple[ta.programs.Program[Noted], ta.AccelRef, float]] = []
    with trio.fail_after(60):
        for number in range(120):
            step = random.choice(["open", "close", "ask", "ask", "ask", "lose", "lose spare", "leave"])
            if step == "open" and len(alive) < 5:
                x = await device.put(np.full(random.choice([10, 1 << 20, 5 << 20]), float(number)))
                alive.append((await noted(device, notes, x), x, float(number)))
            elif step == "lose" and device.dispatch.process:  # type: ignore[attr-defined]
                device.dispatch.process.kill()  # type: ignore[attr-defined]
            elif step == "lose spare" and pool(device)._spares:
                pool(device)._spares[0].process.kill()
            elif alive and step in ("ask", "leave", "close"):
                program, x, value = alive[random.randrange(len(alive))]
                if step == "ask":
                    assert await program.ask(Noted.sum) == value * x.size
                    assert await program.ask(Noted.told_first) == value
                elif step == "leave":
                    with trio.move_on_after(0.01 * random.random()):
                        await program.ask(Noted.sum)
                else:
                    alive.remove((program, x, value))
                    await program.aclose()
                    x.release()


async def test_a_spare_of_any_backend_knows_the_arrays(system: ta.System, notes: Notes) -> None:
    async with system.open_device(BACKEND, options=options(spares=1)) as device:
        x = await device.put(np.arange(3000.0))
        async with ta.open_program(device, Placed, x, folder=str(notes.folder)) as program:
            for _ in range(2):
                await until(lambda: spares(device) and spares(device) <= set(notes.of("made")))
                (spare,) = spares(device)
                await replace(device)
                pid, address, shape = await program.ask(Placed.where)
                assert (pid, list(shape)) == (spare, [3000])
                assert address
                assert notes.of("made").count(spare) == 1
                assert (await x.to_host()).tolist() == list(range(3000))
