"""Deaths of the launcher and of the application, expected and sudden: nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from chosen import SEARCHED
from chunk_files import sealed
from interrupter import is_only_ctrl_c
from processes import children, descriptors, in_session, launcher, wait_dead, workers

from trio_accel.actors import ActorFailedError, ActorStarted, ActorSystem, open_system
from trio_accel.devices.launcher import _link as _launcher_link
from trio_accel.devices.launcher._launcher import Launcher, LauncherError, open_launcher

pytestmark = [pytest.mark.no_device, pytest.mark.own_launcher]

SLEEP = ("-I", "-S", "-c", "import signal; signal.pause()")
STUBBORN = ("-I", "-S", "-c", "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.pause()")
APPLICATION = Path(__file__).with_name("launching_application.py")
SIZE = 1 << 20


def chunk() -> int:
    descriptor = sealed(SIZE)
    os.pwrite(descriptor, bytes(SIZE), 0)
    return descriptor


def kept(process: int) -> int:
    """How many chunks a launcher holds."""
    return sum("chunk of a test" in target for target in descriptors(process).values())


async def begun(found: Launcher) -> None:
    """Wait until all orders have been executed."""
    worker = await found.start_worker(["-I", "-S", "-c", ""])
    await worker.wait()


async def replace_launcher(system: ActorSystem) -> None:
    """Kill the launcher, and wait until the next one serves."""
    started = trio.Event()
    with system.subscribe(lambda event: started.set() if isinstance(event, ActorStarted) else None):
        os.kill(launcher(), signal.SIGKILL)
        await started.wait()


async def test_the_end_of_the_system_leaves_nothing() -> None:
    before = descriptors()
    async with open_system("short") as system:
        found = await open_launcher(system)
        process = launcher()
        one = await found.start_worker(SLEEP)
        other = await found.start_worker(STUBBORN)
        other.send_signal(signal.SIGSTOP)
    assert children() == set()
    assert workers(process) == set()
    assert descriptors() == before
    assert one.is_dead
    assert await other.wait() == "ended with its launcher"


async def test_a_cancelled_program_leaves_nothing() -> None:
    before = descriptors()
    with trio.CancelScope() as scope:
        async with open_system("short") as system:
            worker = await (await open_launcher(system)).start_worker(SLEEP)
            scope.cancel()
            await trio.sleep_forever()
    assert children() == set()
    assert worker.is_dead
    assert descriptors() == before


async def test_a_launcher_that_does_nothing_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launcher_link, "_END", 0.05)
    async with open_system("short") as system:
        worker = await (await open_launcher(system)).start_worker(SLEEP)
        os.kill(launcher(), signal.SIGSTOP)
    assert children() == set()
    assert worker.is_dead
    assert await worker.wait() == "ended with its launcher"


async def test_the_death_of_the_launcher_ends_its_workers_and_it_is_replaced(system: ActorSystem) -> None:
    found = await open_launcher(system)
    process = launcher()
    old = [await found.start_worker(SLEEP), await found.start_worker(SLEEP)]
    old[1].send_signal(signal.SIGSTOP)
    os.kill(process, signal.SIGKILL)
    assert [await worker.wait() for worker in old] == ["ended with its launcher"] * 2
    assert all(worker.is_dead for worker in old)
    # Waits for the next launcher.
    new = await found.start_worker(SLEEP)
    assert launcher() != process
    assert workers(launcher()) == {new.pid}
    snapshot = system.tree().find("test/launcher/process")
    assert snapshot.restarts == 1
    assert snapshot.last_error == "LauncherError: the launcher of worker processes was killed by SIGKILL"


async def test_workers_die_by_themselves_when_the_launcher_does() -> None:
    # The application takes no part: it looks at nothing but the descriptors of the processes.
    link = await _launcher_link.LauncherLink.open()
    directory = os.open(".", os.O_PATH)
    order = {"arguments": [sys.executable, *SLEEP], "environment": {}, "descriptors": 1}
    link.send("start", 1, order, [directory])
    os.close(directory)
    report = await link.receive()
    (worker,) = report.descriptors
    os.kill(launcher(), signal.SIGKILL)
    with trio.fail_after(60):
        await wait_dead(worker)
    os.close(worker)
    assert await link.close() == "was killed by SIGKILL"


async def test_unbegun_starts_of_a_launcher_are_left_to_the_next(system: ActorSystem) -> None:
    found = await open_launcher(system)
    os.kill(launcher(), signal.SIGSTOP)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(begun, found)
        await trio.testing.wait_all_tasks_blocked()
        await replace_launcher(system)


async def test_a_start_may_be_cancelled_while_there_is_no_launcher(
    system: ActorSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await open_launcher(system)
    os.kill(launcher(), signal.SIGSTOP)
    opening = trio.Event()

    async def never() -> None:
        opening.set()
        await trio.sleep_forever()

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(found.start_worker, SLEEP)
            await trio.testing.wait_all_tasks_blocked()
            monkeypatch.setattr(_launcher_link.LauncherLink, "open", never)
            os.kill(launcher(), signal.SIGKILL)
            await opening.wait()
            scope.cancel()
    assert scope.cancelled_caught
    found.ref.cancel("it never starts")


async def test_a_start_fatal_to_two_launchers_fails(
    system: ActorSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await open_launcher(system)
    # Every launcher from now on dies of its first order.
    send = _launcher_link.LauncherLink.send
    monkeypatch.setattr(_launcher_link.LauncherLink, "send", lambda self, kind, *_: send(self, kind, 0, 0))
    with pytest.raises(LauncherError, match="was not started: the launcher exited with code 1"):
        await found.start_worker(SLEEP)
    assert system.tree().find("test/launcher/process").failed == 0


async def test_a_start_without_a_launcher_fails(system: ActorSystem) -> None:
    found = await open_launcher(system)
    os.kill(launcher(), signal.SIGSTOP)
    async with trio.open_nursery() as nursery:

        async def fail() -> None:
            with pytest.raises(ActorFailedError):
                await found.start_worker(SLEEP)

        nursery.start_soon(fail)
        await trio.testing.wait_all_tasks_blocked()
        found.ref.cancel("a test")
        os.kill(launcher(), signal.SIGCONT)


async def test_a_cancelled_start_ends_when_the_launcher_dies(system: ActorSystem) -> None:
    found = await open_launcher(system)
    os.kill(launcher(), signal.SIGSTOP)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(found.start_worker, SLEEP)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            os.kill(launcher(), signal.SIGKILL)
    assert scope.cancelled_caught
    await begun(found)


async def test_chunks_are_kept_by_each_launcher_until_they_are_forgotten(system: ActorSystem) -> None:
    found = await open_launcher(system)
    memory = [chunk(), chunk()]
    for descriptor in memory:
        found.keep_chunk(descriptor)
    await begun(found)
    first = launcher()
    assert kept(first) == 2
    await replace_launcher(system)
    await begun(found)
    assert launcher() != first
    assert kept(launcher()) == 2
    found.forget_chunk(memory[0])
    await begun(found)
    assert kept(launcher()) == 1
    # Once more does nothing.
    found.forget_chunk(memory[0])
    await begun(found)
    assert kept(launcher()) == 1
    # The launcher's death does not concern the application.
    assert [os.fstat(descriptor).st_blocks * 512 for descriptor in memory] == [SIZE, SIZE]
    for descriptor in memory:
        os.close(descriptor)


async def test_chunks_survive_the_end_of_the_system() -> None:
    memory = chunk()
    async with open_system("short") as system:
        found = await open_launcher(system)
        found.keep_chunk(memory)
        await begun(found)
    assert os.fstat(memory).st_blocks * 512 == SIZE
    os.close(memory)


async def test_no_closed_chunk_is_kept(system: ActorSystem) -> None:
    found = await open_launcher(system)
    memory = chunk()
    os.close(memory)
    with pytest.raises(OSError, match="Bad file descriptor"):
        found.keep_chunk(memory)
    # Nor is it reported to the next launcher.
    await replace_launcher(system)
    await begun(found)


@attrs.frozen
class Application:
    """A running `launching_application`, with the descriptors of its processes."""

    process: trio.Process
    launcher: int
    worker: int
    memory: int

    async def read(self) -> str:
        assert self.process.stdout is not None
        return bytes(await self.process.stdout.receive_some()).decode()

    def size(self) -> int:
        """Bytes that the memory takes."""
        return os.fstat(self.memory).st_blocks * 512


@asynccontextmanager
async def running_application(*options: str) -> AsyncGenerator[Application, None]:
    environment = {**os.environ, "PYTHONPATH": SEARCHED, "OPENBLAS_NUM_THREADS": "1"}
    process = await trio.lowlevel.open_process(
        [sys.executable, str(APPLICATION), *options],
        stdout=subprocess.PIPE,
        env=environment,
        process_group=0,
    )
    assert process.stdout is not None
    async with process.stdout:
        said = json.loads(await process.stdout.receive_some())
        child = said["child"]
        held = [
            os.pidfd_open(launcher(process.pid)),
            os.pidfd_open(said["worker"]),
            # Descriptors that the application gives away only with its death, or not even then.
            os.open(f"/proc/{child or process.pid}/fd/{said['memory']}", os.O_RDONLY),
        ]
        dying = held[:2]
        if child:
            held.append(os.pidfd_open(child))
            dying.append(held[-1])
        try:
            yield Application(process, *held[:3])
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
            process.kill()
            with trio.fail_after(60, shield=True):
                await wait_dead(*dying)
                await process.wait()
            for descriptor in held:
                os.close(descriptor)


@pytest.mark.parametrize("options", [(), ("stop",), ("fork",), ("fork", "stop"), ("parent",)])
async def test_the_sudden_death_of_the_application_ends_everything(options: tuple[str, ...]) -> None:
    async with running_application(*options) as application:
        assert application.size() == SIZE
        application.process.kill()
        with trio.fail_after(60):
            await wait_dead(application.worker, application.launcher)
        assert application.size() == 0


async def test_a_file_in_the_place_of_a_chunk_keeps_its_contents(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"contents")
    async with running_application("file", str(file)) as application:
        application.process.kill()
        with trio.fail_after(60):
            await wait_dead(application.worker, application.launcher)
        assert application.size() == 0
    assert file.read_bytes() == b"contents"


async def test_the_death_of_the_application_is_seen_after_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv("TRIO_ACCEL_TEST_PIPE", str(pipe))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    async with running_application("import") as application:
        with trio.fail_after(60):
            # The module is being imported, and continues when the reader has ended.
            await trio.lowlevel.wait_readable(reader)
        process = launcher(application.process.pid)
        application.process.kill()
        await application.process.wait()
        trio.lowlevel.notify_closing(reader)
        os.close(reader)
        with trio.fail_after(60):
            await wait_dead(application.worker, application.launcher)
        assert application.size() == 0
        assert in_session(process) == set()


async def test_ctrl_c_reaches_only_the_application() -> None:
    async with running_application() as application:
        os.killpg(application.process.pid, signal.SIGINT)
        assert await application.read() == "interrupted\n"
        with trio.CancelScope() as scope:
            scope.cancel()
            await wait_dead(application.launcher)
        assert scope.cancelled_caught
        # It obeys still.
        process = launcher(application.process.pid)
        assert len(workers(process)) == 1
        assert application.size() == SIZE


def test_ctrl_c_while_a_worker_is_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's answers must find the order at any time of Ctrl-C."""
    order = _launcher_link.LauncherLink.order

    def interrupted(*args: Any, **kwargs: Any) -> None:
        order(*args, **kwargs)
        # So long that the launcher has answered when the loop looks next.
        # clock: a longer pause only makes it surer
        time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)

    async def program() -> None:
        async with open_system("s") as system:
            await (await open_launcher(system)).start_worker(SLEEP)
            await trio.sleep_forever()

    monkeypatch.setattr(_launcher_link.LauncherLink, "order", interrupted)
    with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)) as caught:  # noqa: ASYNC401  # any group will do
        trio.run(program)
    assert is_only_ctrl_c(caught.value), repr(caught.value)
