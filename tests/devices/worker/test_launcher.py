"""Worker processes: their start, their inheritance, and their end."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from processes import children, descriptors, launcher, workers

from trio_accel.actors import ActorSystem, open_system
from trio_accel.backends.base import AccelError, NotSupportedError
from trio_accel.devices.launcher import _launcher
from trio_accel.devices.launcher import _link as _launcher_link
from trio_accel.devices.launcher._launcher import Launcher, LauncherError, StartWorker, open_launcher

pytestmark = [pytest.mark.no_device, pytest.mark.own_launcher]

SLEEP = ("-I", "-S", "-c", "import signal; signal.pause()")

# A worker is a fresh interpreter, or a fork of a launcher with this module imported.
AHEAD = "colorsys"
WAYS = pytest.mark.parametrize("preload", [(), (AHEAD,)], ids=["fresh", "fork"])

REPORT = """
import ctypes, json, os, resource, signal, sys
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))
# The listing's own is closed by now.
names = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
report = {
    "open": {name: os.readlink(f"/proc/self/fd/{name}") for name in names},
    "session": os.getsid(0),
    "parent": os.getppid(),
    "death signal": number.value,
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "directory": os.getcwd(),
    "environment": dict(os.environ),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "usual": [signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGUSR1, signal.SIGHUP)],
    "ignored": [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "ahead": "colorsys" in sys.modules,
}
os.write(3, json.dumps(report).encode())
"""


@pytest.fixture
async def workshop(system: ActorSystem) -> Launcher:
    """The launcher of the system."""
    return await open_launcher(system)


@contextmanager
def stopped(process: int) -> Generator[None, None, None]:
    """Let a process do nothing for a while."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


async def report_of_worker(workshop: Launcher, preload: Sequence[str] = ()) -> dict[str, Any]:
    reader, writer = os.pipe()
    try:
        worker = await workshop.start_worker(["-c", REPORT], [writer], preload)
        assert await worker.wait() == "exited with code 0"
        report = json.loads(os.read(reader, 1 << 16))
        assert report["ahead"] is bool(preload)
        return report
    finally:
        os.close(reader)
        os.close(writer)


@WAYS
async def test_a_worker_has_nothing_but_its_own(workshop: Launcher, preload: tuple[str, ...]) -> None:
    report = await report_of_worker(workshop, preload)
    files = report["open"]
    assert sorted(files) == ["0", "1", "2", "3"]
    assert files["0"] == files["1"] == os.devnull
    assert files["2"] == descriptors()[2]
    assert files["3"].startswith("pipe:")


@WAYS
async def test_a_worker_dies_with_its_launcher_and_leaves_no_core(
    workshop: Launcher, preload: tuple[str, ...]
) -> None:
    report = await report_of_worker(workshop, preload)
    assert report["session"] == report["parent"] == launcher()
    assert report["death signal"] == signal.SIGKILL
    assert report["core"] == [0, 0]


@WAYS
@pytest.mark.parametrize("make", [os.pipe, os.openpty])
async def test_a_worker_that_makes_its_standard_error_non_blocking_does_not_so_here(
    system: ActorSystem, preload: tuple[str, ...], make: Callable[[], tuple[int, int]]
) -> None:
    reader, writer = make()
    before = os.dup(2)
    os.dup2(writer, 2)
    try:
        workshop = await open_launcher(system)
        code = "import os; os.set_blocking(2, False); os.write(2, b'so it is')"
        worker = await workshop.start_worker(["-c", code], (), preload)
        assert await worker.wait() == "exited with code 0"
        assert os.get_blocking(2)
        # It is the same pipe or terminal all the same.
        assert os.read(reader, 8) == b"so it is"
    finally:
        os.dup2(before, 2)
        for descriptor in (reader, writer, before):
            os.close(descriptor)


@WAYS
async def test_a_worker_begins_as_if_the_application_had_started_it(
    system: ActorSystem, preload: tuple[str, ...]
) -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        report = await report_of_worker(await open_launcher(system), preload)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert report["blocked"] == []
    assert report["usual"] == [True, True]
    assert report["ignored"] == [signal.SIGPIPE, signal.SIGXFSZ]
    assert report["interrupt"]
    assert report["files"] == [*resource.getrlimit(resource.RLIMIT_NOFILE)]


@WAYS
async def test_a_worker_has_directory_and_environment_of_its_start(
    workshop: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, preload: tuple[str, ...]
) -> None:
    # Nor what it was when modules were imported.
    await report_of_worker(workshop, preload)
    monkeypatch.setenv("ODD", "a\udcffb\n")
    monkeypatch.delenv("PATH")
    monkeypatch.chdir(tmp_path)
    report = await report_of_worker(workshop, preload)
    assert report["directory"] == os.getcwd()
    assert report["environment"]["ODD"] == "a\udcffb\n"
    assert "PATH" not in report["environment"]
    assert report["environment"]["TRIO_ACCEL_TEST_MARK"] == os.environ["TRIO_ACCEL_TEST_MARK"]


@WAYS
async def test_descriptors_arrive_in_order_and_stay_the_callers(
    workshop: Launcher, preload: tuple[str, ...]
) -> None:
    pipes = [os.pipe() for _ in range(12)]
    writers = [writer for _, writer in pipes]
    code = "import os\nfor number in range(12): os.write(3 + number, b'%d' % number)"
    # Backwards: each is wanted where another one is.
    worker = await workshop.start_worker(("-c", code), reversed(writers), preload)
    assert await worker.wait() == "exited with code 0"
    for number, (reader, writer) in enumerate(reversed(pipes)):
        assert os.read(reader, 9) == b"%d" % number
        os.close(reader)
        os.close(writer)


HEAVY = """
import mmap, os, signal
memory = mmap.mmap(-1, 256 << 20)
for page in range(0, len(memory), mmap.PAGESIZE):
    memory[page] = 1
os.close(3)
{end}
"""


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os._exit(3)", "exited with code 3"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "was killed by SIGTERM"),
    ],
)
async def test_the_end_of_a_slowly_ending_process(workshop: Launcher, end: str, how: str) -> None:
    reader, writer = os.pipe()
    worker = await workshop.start_worker(("-c", HEAVY.format(end=end)), [writer])
    os.close(writer)
    # It ends.
    await trio.lowlevel.wait_readable(reader)
    os.close(reader)
    said: set[str | None] = set()
    while not worker.is_dead:
        said.add(worker.ending())
    # Known facts are true, also between its death and the launcher's report.
    said.add(worker.ending())
    assert said <= {None, how}
    assert await worker.wait() == how
    assert worker.ending() is None


async def test_how_a_dead_process_has_ended_is_known_without_its_launcher(workshop: Launcher) -> None:
    # A stopped launcher reaps nothing, just as a late launcher on a busy machine.
    worker = await workshop.start_worker(("-c", "import time; time.sleep(60)"), [])
    status = await trio.Path(f"/proc/{worker.pid}/stat").read_text()
    launcher = int(status.rpartition(")")[2].split()[1])
    os.kill(launcher, signal.SIGSTOP)
    try:
        os.kill(worker.pid, signal.SIGKILL)
        await worker.wait_dead()
        assert worker.ending() == "was killed by SIGKILL"
    finally:
        os.kill(launcher, signal.SIGCONT)
    assert await worker.wait() == "was killed by SIGKILL"
    assert worker.ending() is None


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("raise SystemExit(3)", "exited with code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 40)", "was killed by signal 40"),
    ],
)
@WAYS
async def test_the_end_of_a_worker_is_described_in_words(
    workshop: Launcher, code: str, how: str, preload: tuple[str, ...]
) -> None:
    worker = await workshop.start_worker(["-c", code], preload=preload)
    assert await worker.wait() == how
    assert worker.is_dead
    assert repr(worker) == f"<WorkerProcess {worker.pid}, {how}>"
    worker.kill()
    worker.close()
    assert await worker.wait() == how


async def test_a_stopped_worker_can_be_killed(workshop: Launcher) -> None:
    worker = await workshop.start_worker(SLEEP)
    worker.send_signal(signal.SIGSTOP)
    assert not worker.is_dead
    worker.kill()
    assert await worker.wait() == "was killed by SIGKILL"
    assert worker.pid not in workers(launcher())


async def test_several_tasks_may_wait_and_give_up(workshop: Launcher) -> None:
    worker = await workshop.start_worker(SLEEP)
    found: list[str] = []

    async def wait() -> None:
        found.append(await worker.wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            scope.cancel()
            await worker.wait()
        assert scope.cancelled_caught
        assert found == []
        worker.close()
    assert found == ["was killed by SIGKILL"] * 2


async def test_a_closed_worker_is_killed(workshop: Launcher) -> None:
    worker = await workshop.start_worker(SLEEP)
    worker.close()
    worker.close()
    assert await worker.wait() == "was killed by SIGKILL"
    assert worker.is_dead


@WAYS
async def test_many_workers_leave_no_descriptor(workshop: Launcher, preload: tuple[str, ...]) -> None:
    before, of_launcher = descriptors(), descriptors(launcher())
    options = () if preload else ("-I", "-S")
    for _ in range(50):
        worker = await workshop.start_worker([*options, "-c", ""], preload=preload)
        await worker.wait()
    assert descriptors() == before
    assert descriptors(launcher()) == of_launcher


async def test_workers_start_concurrently(workshop: Launcher) -> None:
    pids = set()

    async def start() -> None:
        pids.add((await workshop.start_worker(SLEEP)).pid)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(start)
    assert workers(launcher()) == pids
    assert len(pids) == 8


async def test_an_ask_does_the_same(workshop: Launcher) -> None:
    worker = await workshop.ref.ask(StartWorker(("-I", "-S", "-c", "")))
    assert await worker.wait() == "exited with code 0"


@pytest.mark.parametrize("begun", [False, True])
async def test_a_cancelled_start_leaves_nothing(workshop: Launcher, begun: bool) -> None:
    process = launcher()
    before = descriptors()
    reader, writer = os.pipe()
    with stopped(process):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(workshop.start_worker, SLEEP, (writer,))
            if begun:
                # The order is sent, and waits for the launcher.
                await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            await trio.lowlevel.cancel_shielded_checkpoint()
            os.kill(process, signal.SIGCONT)
    # Nobody else holds the end of the pipe: its holders are dead and reaped.
    os.close(writer)
    with trio.fail_after(60):
        await trio.lowlevel.wait_readable(reader)
    assert os.read(reader, 1) == b""
    os.close(reader)
    assert workers(process) == set()
    assert descriptors() == before


async def test_a_closed_descriptor_is_refused(workshop: Launcher) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    with pytest.raises(LauncherError, match="could not be ordered") as caught:
        # Not the other, because its number is free for files that the order itself opens.
        await workshop.start_worker(SLEEP, [writer])
    assert isinstance(caught.value.__cause__, OSError)
    assert isinstance(caught.value, AccelError)
    assert workers(launcher()) == set()


async def test_too_long_an_order_is_refused(workshop: Launcher) -> None:
    with pytest.raises(LauncherError, match="too long"):
        await workshop.start_worker(["-c", "pass" * 100_000])
    assert (await report_of_worker(workshop))["parent"] == launcher()


@pytest.mark.parametrize(("executable", "what"), [("/nowhere/python", "No such file"), ("/tmp\0", "null")])
async def test_a_missing_program_is_named(
    workshop: Launcher, monkeypatch: pytest.MonkeyPatch, executable: str, what: str
) -> None:
    before = descriptors(launcher())
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(LauncherError, match=what):
        await workshop.start_worker(SLEEP)
    assert children(launcher()) == set()
    assert descriptors(launcher()) == before


async def test_a_worker_that_cannot_be_taken_is_ended(workshop: Launcher) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    process = launcher()
    used = descriptors()
    free = next(number for number in range(len(used) + 1) if number not in used)
    async with trio.open_nursery() as nursery:

        async def fail() -> None:
            with pytest.raises(LauncherError, match="too many open files"):
                await workshop.start_worker(SLEEP)
            nursery.cancel_scope.cancel()

        with stopped(process):
            nursery.start_soon(fail)
            await trio.testing.wait_all_tasks_blocked()
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            await trio.sleep_forever()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    # It was ordered to be killed before this one was to be started.
    assert (await report_of_worker(workshop))["parent"] == process
    assert workers(process) == set()


async def test_orders_and_reports_never_wait_for_each_other() -> None:
    link = await _launcher_link.LauncherLink.open()
    number = 3000
    before = descriptors()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.write)
        with stopped(launcher()):
            for order in range(number):
                # Far more than the socket takes; each is refused, because it has no descriptor.
                link.send("start", order, {"descriptors": 1})
            link.send("keep", 0, None, (0,))
        await trio.testing.wait_all_tasks_blocked()
        reports = [await link.receive() for _ in range(number)]
        nursery.cancel_scope.cancel()
    assert [(report.kind, report.number) for report in reports] == [
        ("failed", order) for order in range(number)
    ]
    assert descriptors() == before
    assert await link.close() == "exited with code 0"
    link.send("kill", 0)


async def test_there_is_one_launcher_a_system(system: ActorSystem) -> None:
    found: list[Launcher] = []

    async def find() -> None:
        found.append(await open_launcher(system))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(find)
    assert {id(each) for each in found} == {id(await open_launcher(system))}
    assert found[0].ref.path == "test/launcher/process"
    async with open_system("other") as other:
        assert await open_launcher(other) is not found[0]
        assert len(children()) == 2


async def test_an_ended_system_is_not_held() -> None:
    gc.collect()
    before = len(_launcher._launchers)
    async with open_system("other") as system:
        await open_launcher(system)
    del system
    gc.collect()
    assert len(_launcher._launchers) == before


async def test_a_stopped_launcher_is_replaced_when_asked_for(system: ActorSystem) -> None:
    found = await open_launcher(system)
    await found.ref.stop()
    assert children() == set()
    again = await open_launcher(system)
    assert not again.ref.is_terminated
    assert (await report_of_worker(again))["parent"] == launcher()


async def test_a_cancelled_opening_leaves_nothing(system: ActorSystem) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await open_launcher(system)
    assert scope.cancelled_caught
    assert children() == set()
    assert (await report_of_worker(await open_launcher(system)))["parent"] == launcher()


@pytest.mark.parametrize(
    ("executable", "what"),
    [("/nowhere/python", "could not be started"), ("/bin/false", "exited with code 1")],
)
async def test_a_launcher_that_does_not_start_gives_the_reason(
    system: ActorSystem, monkeypatch: pytest.MonkeyPatch, executable: str, what: str
) -> None:
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", executable)
        with pytest.raises(LauncherError, match=what):
            await open_launcher(system)
    # Threads of Trio started meanwhile have none of their own.
    assert descriptors() == before
    assert await open_launcher(system)


async def test_a_platform_without_process_descriptors_is_advised_to_use_inline(
    system: ActorSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(os, "pidfd_open")
        with pytest.raises(NotSupportedError, match="isolation='inline'"):
            await open_launcher(system)


async def test_an_actor_of_that_name_is_accepted(system: ActorSystem) -> None:
    other = await system.spawn(_launcher.LauncherActor, Launcher(), name="launcher")
    assert (await open_launcher(system)).ref.path == "test/launcher#2/process"
    await other.stop()
