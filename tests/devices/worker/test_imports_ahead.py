"""Modules of the program that the launcher preloads, each on trial in a child first."""

from __future__ import annotations

import importlib
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from isolated import options, replace_worker
from processes import children, command, descriptors, launcher, until, workers

import trio_accel as ta
from trio_accel.backends.cpu import CpuBackend
from trio_accel.backends.cuda import _probe_process
from trio_accel.devices.launcher import _launcher_trial
from trio_accel.devices.launcher._launcher import Launcher, open_launcher

pytestmark = [pytest.mark.any_backend, pytest.mark.own_launcher]

BASE = ("colorsys",)
# Whose import it was, and how often there was one.
WHO = "import os\nPID = os.getpid()\nwith open({log!r}, 'a') as log:\n    print(PID, file=log)\n"
SAY = "import json, os, sys; say = lambda what: os.write(3, json.dumps(what).encode()); "


@pytest.fixture
async def workshop(system: ta.System) -> Launcher:
    """The launcher of the system."""
    return await open_launcher(system)


class Modules:
    """Modules of a test, which note who imports them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, source: str = "") -> None:
        who = WHO.format(log=str(self.folder / f"{name}.log"))
        (self.folder / f"{name}.py").write_text(who + source)

    def importers(self, name: str) -> list[int]:
        log = self.folder / f"{name}.log"
        return [int(line) for line in log.read_text().split()] if log.exists() else []


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Modules:
    monkeypatch.syspath_prepend(tmp_path)
    return Modules(tmp_path)


async def compile_c(source: str, target: Path, *given: str) -> None:
    """Make a shared library; without a compiler the test is skipped."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("there is no gcc to make a library with")
    compiler = [gcc, "-shared", "-fPIC", *given, "-x", "c", "-", "-o", str(target)]
    await trio.run_process(compiler, stdin=source.encode())


async def loaded_in_a_worker(workshop: Launcher, *names: str) -> list[bool]:
    """Which of the modules a worker begins with, that is a fork of the launcher."""
    code = SAY + f"say([name in sys.modules for name in {names!r}] + [os.getppid()])"
    reader, writer = os.pipe()
    try:
        worker = await workshop.start_worker(("-c", code), [writer], BASE)
    finally:
        os.close(writer)
    assert is_fork(worker.pid)
    await worker.wait()
    *found, parent = json.loads(os.read(reader, 1 << 16))
    os.close(reader)
    assert parent == launcher()
    return found


def is_pending(workshop: Launcher) -> bool:
    """Whether a launcher has yet to report the outcome of a module."""
    return workshop.ahead.is_pending


def is_fork(pid: int) -> bool:
    """Whether a worker is a fork of the launcher, or dead already."""
    return "_launcher_process.py" in command(pid) or not command(pid)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "imported ahead" in record.getMessage()]


async def test_a_module_is_tried_by_a_child_and_then_imported_once(
    workshop: Launcher, modules: Modules, caplog: pytest.LogCaptureFixture
) -> None:
    modules.write("one", "import pdb, readline\n")
    modules.write("two", "import one, numpy, scipy.linalg\n")
    await workshop.import_ahead(("one", "two"), BASE)
    assert await loaded_in_a_worker(workshop, "one", "two") == [True, True]
    for name in ("one", "two"):
        (importer,) = modules.importers(name)
        assert importer != launcher()
    # Known by now: nothing is imported again.
    await workshop.import_ahead(("two", "one"), BASE)
    assert len(modules.importers("one")) == 1
    assert warned(caplog) == []


BAD: dict[str, tuple[str, str]] = {
    "an error": ("raise KeyError('why')\n", "KeyError('why')"),
    "an exit": ("raise SystemExit(3)\n", "SystemExit(3)"),
    "a syntax error": ("not a program\n", "SyntaxError"),
    "a thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, name='spoiler').start()\n",
        "the import of bad has left threads running: spoiler",
    ),
    "an open file": ("FILE = open('/dev/zero')\n", "left a file open: /dev/zero"),
    "a closed file": ("os.close(0)\n", "closed a file"),
    "another standard output": ("os.dup2(os.open('/dev/zero', 2), 1)\n", "left a file open: /dev/zero"),
    "every file closed": ("os.closerange(0, 100)\n", "the process that imported bad exited with code 0"),
    "a socket": ("import socket\nPAIR = socket.socketpair()\n", "left a file open: socket:"),
    "a handler": ("import signal\nsignal.signal(signal.SIGTERM, print)\n", "SIGTERM"),
    "a native handler": ("import faulthandler\nfaulthandler.enable()\n", "SIGSEGV"),
    "a signal ignored": ("import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n", "SIGCHLD"),
    "a blocked signal": ("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [15])\n", "SIGTERM"),
    "a variable of a library": ("os.environ['OMP_NUM_THREADS'] = '1'\n", "OMP_NUM_THREADS"),
    "the end of the process": ("os._exit(0)\n", "the process that imported bad exited with code 0"),
    "a crash": ("os.kill(os.getpid(), 11)\n", "the process that imported bad was killed by SIGSEGV"),
    "a process": (
        "import signal\nif not os.fork():\n    signal.pause()\n",
        "left a process running",
    ),
    "a child that lives on": (
        "if not os.fork():\n    import signal\n    signal.pause()\nos._exit(4)\n",
        "the process that imported bad exited with code 4",
    ),
}


@pytest.mark.parametrize("case", BAD)
async def test_modules_no_fork_could_use_are_not_imported_by_the_launcher(
    system: ta.System, workshop: Launcher, modules: Modules, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    source, why = BAD[case]
    modules.write("bad", source)
    modules.write("good")
    for name in ("bad", "good", "bad"):
        await workshop.import_ahead((name,), BASE)
    # The launcher is as it was, and so are its forks.
    assert await loaded_in_a_worker(workshop, "bad", "good") == [False, True]
    assert len(modules.importers("bad")) == (case != "a syntax error")
    (message,) = warned(caplog)
    assert message.startswith("module bad is not imported ahead")
    assert why in message
    assert system.tree().find("test/launcher/process").restarts == 0
    await until(lambda: not workers(launcher()))


@pytest.mark.parametrize("case", ["an error", "a thread", "a crash"])
async def test_of_a_list_with_an_obstacle_nothing_is_imported(
    workshop: Launcher, modules: Modules, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    source, why = BAD[case]
    modules.write("bad", source)
    modules.write("good")
    await workshop.import_ahead(("good", "bad", "never"), BASE)
    assert await loaded_in_a_worker(workshop, "good", "bad") == [False, False]
    (message,) = warned(caplog)
    assert message.startswith(
        "modules good, bad, never are not imported ahead, so each worker that needs them"
    )
    # Nobody reports at which module a process has crashed.
    assert why.replace("imported bad", "imported good, bad, never") in message
    assert {workshop.ahead.judge(name) for name in ("good", "bad", "never")} == {
        ("refused", message.split("to start: ")[1])
    }
    # It delays only its own list.
    await workshop.import_ahead(("good",), BASE)
    assert await loaded_in_a_worker(workshop, "good", "bad") == [True, False]
    assert workshop.ahead.judge("good") == ("fully", None)


async def test_a_launcher_with_too_many_open_files_imports_nothing_and_warns(
    workshop: Launcher, modules: Modules, caplog: pytest.LogCaptureFixture
) -> None:
    modules.write("one")
    used = descriptors(launcher())
    free = next(number for number in range(len(used) + 1) if number not in used)
    before = resource.prlimit(launcher(), resource.RLIMIT_NOFILE)
    resource.prlimit(launcher(), resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        await workshop.import_ahead(("one",), BASE)
    finally:
        resource.prlimit(launcher(), resource.RLIMIT_NOFILE, before)
    (message,) = warned(caplog)
    assert "too many open files in the launcher" in message
    assert modules.importers("one") == []


async def test_a_missing_module_is_named(workshop: Launcher, caplog: pytest.LogCaptureFixture) -> None:
    await workshop.import_ahead(("not_there",), BASE)
    (message,) = warned(caplog)
    assert "module not_there" in message
    assert "No module named 'not_there'" in message


# As PyTorch's driver is loaded by an import: `INITIALIZED` once anybody has called `cuInit`.
DRIVER = """
static int is_initialised;
int cuInit(unsigned flags) { is_initialised = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return is_initialised ? 0 : 3; }
"""


@pytest.mark.parametrize("initialises", [False, True])
async def test_an_import_that_initialises_cuda_is_seen(
    workshop: Launcher, modules: Modules, caplog: pytest.LogCaptureFixture, *, initialises: bool
) -> None:
    driver = modules.folder / "libcuda.so.1"
    await compile_c(DRIVER, driver)
    # With threads of the driver's.
    call = f"DRIVER.cuInit(0)\n{BAD['a thread'][0]}" if initialises else ""
    modules.write("driving", f"import ctypes\nDRIVER = ctypes.CDLL({str(driver)!r})\n{call}")
    await workshop.import_ahead(("driving",), BASE)
    assert await loaded_in_a_worker(workshop, "driving") == [not initialises]
    assert ["initialises CUDA" in message for message in warned(caplog)] == [True] * initialises


def test_a_descriptor_of_the_driver_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/self/fd/0": "/dev/null", "/proc/self/fd/7": "/dev/nvidiactl"}
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", lambda folder: [Path(path).name for path in files])
        patched.setattr(os, "readlink", files.__getitem__)
        patched.setattr(_probe_process, "_is_initialised", bool)
        why = _probe_process.driver_in_use()
        assert why is not None
        assert "initialises CUDA" in why
        del files["/proc/self/fd/7"]
        assert _probe_process.driver_in_use() is None


async def test_changes_of_the_environment_by_an_import_are_found_by_forks(
    workshop: Launcher, modules: Modules
) -> None:
    modules.write("setting", "os.environ['SETTING'] = 'here'\n")
    await workshop.import_ahead(("setting",), BASE)
    reader, writer = os.pipe()
    worker = await workshop.start_worker(("-c", SAY + "say(os.environ['SETTING'])"), [writer], BASE)
    os.close(writer)
    assert await worker.wait() == "exited with code 0"
    assert json.loads(os.read(reader, 100)) == "here"
    os.close(reader)


@pytest.fixture
def pipe(modules: Modules) -> Path:
    """Imports of the module ``slow`` wait until it has had a writer."""
    path = modules.folder / "pipe"
    os.mkfifo(path)
    modules.write("slow", f"with open({str(path)!r}) as pipe:\n    pipe.read()\n")
    return path


async def let_go(pipe: Path, modules: Modules) -> None:
    """Let the trial end that waits."""
    await until(lambda: len(modules.importers("slow")) == 1)
    os.close(await trio.to_thread.run_sync(os.open, pipe, os.O_WRONLY))


async def test_the_launcher_serves_while_a_child_imports(
    workshop: Launcher, modules: Modules, pipe: Path, nursery: trio.Nursery
) -> None:
    nursery.start_soon(workshop.import_ahead, ("slow",), BASE)
    await until(lambda: modules.importers("slow"))
    # It starts workers, and buries them.
    assert await loaded_in_a_worker(workshop, "slow") == [False]
    await let_go(pipe, modules)
    await workshop.import_ahead(("slow",), BASE)
    assert await loaded_in_a_worker(workshop, "slow") == [True]


async def test_a_list_that_waits_for_a_trial_is_tried_after_it(
    workshop: Launcher, modules: Modules, pipe: Path, nursery: trio.Nursery
) -> None:
    modules.write("one")
    nursery.start_soon(workshop.import_ahead, ("slow",), BASE)
    await until(lambda: modules.importers("slow"))
    nursery.start_soon(workshop.import_ahead, ("one",), BASE)
    # The launcher serves orders one after the other, so it has the second list when this worker starts.
    assert await loaded_in_a_worker(workshop, "slow", "one") == [False, False]
    await let_go(pipe, modules)
    await until(lambda: modules.importers("one"))
    await workshop.import_ahead(("slow", "one"), BASE)
    assert await loaded_in_a_worker(workshop, "slow", "one") == [True, True]


async def test_a_caller_that_leaves_does_not_end_the_import(
    workshop: Launcher, modules: Modules, pipe: Path
) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await workshop.import_ahead(("slow",), BASE)
    await let_go(pipe, modules)
    await workshop.import_ahead(("slow",), BASE)
    assert await loaded_in_a_worker(workshop, "slow") == [True]


async def test_the_next_launcher_imports_the_modules_of_the_last(
    workshop: Launcher, modules: Modules
) -> None:
    modules.write("one")
    await workshop.import_ahead(("one",), BASE)
    first = launcher()
    os.kill(first, signal.SIGKILL)
    await until(lambda: len(modules.importers("one")) == 2)
    assert launcher() != first
    await until(lambda: not is_pending(workshop))
    assert await loaded_in_a_worker(workshop, "one") == [True]


async def test_a_launcher_that_dies_during_a_trial_leaves_it_to_the_next(
    workshop: Launcher, modules: Modules, pipe: Path, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    nursery.start_soon(workshop.import_ahead, ("slow",), BASE)
    for trials in (1, 2):
        await until(lambda expected=trials: len(modules.importers("slow")) == expected)
        os.kill(launcher(), signal.SIGKILL)
    # The second one is the last: it may be the module that launchers die of.
    await workshop.import_ahead(("slow",), BASE)
    assert await loaded_in_a_worker(workshop, "slow") == [False]
    (message,) = warned(caplog)
    assert "module slow" in message
    assert "SIGKILL" in message


async def test_the_launcher_itself_imports_no_module(
    system: ta.System, workshop: Launcher, modules: Modules, caplog: pytest.LogCaptureFixture
) -> None:
    modules.write("hostile", "if os.getpid() == os.getsid(0): os.kill(os.getpid(), 11)\n")
    await workshop.import_ahead(("hostile",), BASE)
    assert await loaded_in_a_worker(workshop, "hostile") == [True]
    assert system.tree().find("test/launcher/process").restarts == 0
    assert warned(caplog) == []


async def test_a_template_that_dies_is_made_again(workshop: Launcher, modules: Modules) -> None:
    modules.write("one")
    modules.write("two")
    await workshop.import_ahead(("one", "two"), BASE)
    await until(lambda: len(children(launcher())) == 1)
    (template,) = children(launcher())
    os.kill(template, signal.SIGKILL)
    await until(lambda: len(modules.importers("two")) == 2)
    with trio.fail_after(60):
        while await loaded_in_a_worker(workshop, "one", "two") != [True, True]:  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert len(modules.importers("one")) == 2


async def test_the_end_of_the_system_does_not_wait_for_a_trial(modules: Modules, pipe: Path) -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery, ta.open_system("ending") as system:
            workshop = await open_launcher(system)
            nursery.start_soon(workshop.import_ahead, ("slow",), BASE)
            await until(lambda: modules.importers("slow"))
            nursery.cancel_scope.cancel()


def trials_of(
    forks: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[_launcher_trial.ImportTrials, list[Any], list[Any]]:
    """Trials that start sleeping processes; the started processes and the reports."""
    started: list[subprocess.Popen[bytes]] = []
    reported: list[Any] = []

    def spawn(program: Callable[[int], object], descriptors: Sequence[int], launcher: int) -> int:
        started.append(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]))
        return started[-1].pid

    def report(*said: object) -> None:
        reported.append(said)

    def watch(number: int, pid: int) -> int:
        return pid

    program: Any = SimpleNamespace(spawn=spawn, PACKET=100)
    monkeypatch.setattr(_launcher_trial, "program", program)
    launcher: Any = SimpleNamespace(watch=watch, report=report)
    trials = _launcher_trial.ImportTrials(launcher, forks)
    return trials, started, reported


def test_a_child_that_handles_its_alarm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forks:
        def lacks(self, order: dict[str, object]) -> bool:
            return False

        def prepare(self, *_: object) -> None:
            return None

    trials, started, reported = trials_of(Forks(), monkeypatch)
    monkeypatch.setattr(_launcher_trial, "_IMPORT_TIMEOUT", 0.0)
    assert trials.patience() is None
    order = {"preload": [], "checks": [], "path": [], "arguments": [], "modules": [("slow", False)]}
    trials.add(1, order, os.open(".", os.O_PATH))
    assert trials.patience() == 0
    trials.poll()
    trials.poll()
    assert trials.patience() is None
    (child,) = started
    assert child.wait() == -signal.SIGKILL
    assert not trials.ended(child.pid + 1, 0)
    assert trials.ended(child.pid, signal.SIGKILL)
    ((kind, number, verdict),) = reported
    assert (kind, number) == ("tried", 1)
    assert verdict["reason"] == "the import of slow did not end within 0 s"


@pytest.mark.parametrize("name", ["__main__", "", "a b", "a..b", ".a", "a/b", "a.py:C"])
def test_invalid_names_of_modules_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="preload"):
        ta.DeviceOptions(preload=(name,))


@pytest.mark.parametrize("value", ["torch", ["torch"], (1,), None])
def test_modules_must_be_a_tuple_of_names(value: Any) -> None:
    with pytest.raises(TypeError, match="preload"):
        ta.DeviceOptions(preload=value)


async def test_inline_devices_import_nothing_in_advance(system: ta.System) -> None:
    with pytest.raises(ta.NotSupportedError, match="preload"):
        await system.open_device("cpu", options=ta.DeviceOptions(preload=("json",)))


async def test_the_first_worker_of_a_device_begins_with_them(system: ta.System, modules: Modules) -> None:
    modules.write("one")
    async with system.open_device("cpu", options=options(preload=("one",), spares=1)) as device:
        assert len(modules.importers("one")) == 1
        x = await device.put(np.arange(3.0))
        await replace_worker(device)
        assert (await x.to_host()).tolist() == [0.0, 1.0, 2.0]
        assert {is_fork(pid) for pid in workers(launcher())} == {True}
    assert len(modules.importers("one")) == 1


async def test_a_program_of_a_preloaded_module_imports_nothing_again(
    system: ta.System, modules: Modules
) -> None:
    modules.write(
        "replying", "class Answer:\n    def __init__(self, x): pass\n    def get(self): return 42\n"
    )
    replying = importlib.import_module("replying")
    async with system.open_device("cpu", options=options(preload=("replying",), spares=1)) as device:
        program: Any = await ta.open_program(device, replying.Answer, np.ones(2))
        await replace_worker(device)
        assert await program.ask("get") == 42
    # In this process, and in advance.
    assert len(modules.importers("replying")) == 2


async def test_a_backend_without_a_list_can_preload_modules(
    system: ta.System, modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, "preload", ())
    modules.write("one")
    async with system.open_device("cpu", options=options(preload=("one",))) as device:
        assert is_fork(device.dispatch.process.pid)
        assert (await (await device.put(np.ones(2))).to_host()).tolist() == [1.0, 1.0]
    assert len(modules.importers("one")) == 1


async def test_a_device_serves_while_a_module_is_imported_for_the_next_worker(
    system: ta.System, modules: Modules, pipe: Path, nursery: trio.Nursery
) -> None:
    async with system.open_device("cpu", options=options()) as device:
        x = await device.put(np.arange(3.0))
        workshop = await open_launcher(system)
        nursery.start_soon(workshop.import_ahead, ("slow",), BASE)
        await until(lambda: modules.importers("slow"))
        # Its recovery does not wait for the trial.
        await replace_worker(device)
        assert (await x.to_host()).tolist() == [0.0, 1.0, 2.0]
        await let_go(pipe, modules)
        await until(lambda: workshop.ahead.judge("slow") == ("fully", None))


def test_the_log_of_a_refused_module_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with ta.open_system("test") as system:
            await (await open_launcher(system)).import_ahead(("not_there",), BASE)

    trio.run(main)
    (record,) = [record for record in caplog.records if "imported ahead" in record.getMessage()]
    assert record.levelno == logging.WARNING


# A thread of a library that runs no Python.
LIBRARY = """
#define _GNU_SOURCE
#include <pthread.h>
#include <unistd.h>
static void *rest(void *_) { for (;;) pause(); }
void start_resting(void) {
    pthread_t thread;
    pthread_create(&thread, 0, rest, 0);
    pthread_setname_np(thread, "of the library");
}
"""


async def test_a_thread_of_a_library_is_named(workshop: Launcher, modules: Modules) -> None:
    path = modules.folder / "libthreads.so"
    await compile_c(LIBRARY, path, "-pthread")
    modules.write("threads", f"import ctypes\nctypes.CDLL({str(path)!r}).start_resting()\n")
    await workshop.import_ahead(("threads",), BASE)
    why = "the import of threads has left threads running: of the library"
    assert workshop.ahead.judge("threads") == ("refused", why)


THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, name='spoiler').start()\n"


async def test_a_trusted_module_is_imported_despite_its_side_effects(
    workshop: Launcher, modules: Modules, caplog: pytest.LogCaptureFixture
) -> None:
    modules.write("risky", f"FILE = open('/dev/zero')\nimport signal\nsignal.signal(15, print)\n{THREAD}")
    modules.write("broken", "1 / 0\n")
    modules.write("good")
    await workshop.import_ahead((ta.Preload("risky", trusted=True), "good"), BASE)
    await workshop.import_ahead((ta.Preload("broken", trusted=True),), BASE)
    assert await loaded_in_a_worker(workshop, "risky", "broken", "good") == [True, False, True]
    (message,) = warned(caplog)
    assert "module broken is not imported ahead" in message


@pytest.mark.slow
async def test_a_module_with_the_thread_of_pyarrow_returns_without_its_import(
    system: ta.System, modules: Modules
) -> None:
    pytest.importorskip("pyarrow")
    modules.write("one", "import time\ntime.sleep(1.5)\nimport pyarrow\n")
    seconds: list[float] = []
    async with system.open_device("cpu", options=options(preload=("one",))) as device:
        x = await device.put(np.arange(3.0))
        for _ in range(5):
            began = trio.current_time()
            await replace_worker(device)
            assert (await x.to_host()).tolist() == [0.0, 1.0, 2.0]
            seconds.append(trio.current_time() - began)
            assert is_fork(device.dispatch.process.pid)
    # clock: each import would take 1.5 s
    assert min(seconds) < 1.5
    assert len(modules.importers("one")) == 1


# It computes with a team of threads at the import, in the process that workers are forked from.
OPENBLAS = """
import numpy as np
def compute():
    x = np.arange(600.0 * 600).reshape(600, 600) % 7
    return [float((x @ x).sum())]
"""
TEAM = """
import sys
# The test's own process is to have no such threads.
if "pytest" not in sys.modules:
    compute()
AT_IMPORT = len(os.listdir("/proc/self/task"))
class Team:
    def __init__(self, x): pass
    def compute(self): return compute()
    def threads_at_import(self): return AT_IMPORT
"""


@pytest.mark.slow
async def test_threads_of_openblas_compute_in_the_next_worker(
    system: ta.System, modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.arange(600 * 600).reshape(600, 600) % 7
    # Of integers, without the BLAS: the sum of a product's columns, by rows.
    expected = [float(x.sum(axis=0) @ x.sum(axis=1))]
    threads = min(2, len(os.sched_getaffinity(0)))
    modules.write("team", OPENBLAS + TEAM)
    monkeypatch.delitem(sys.modules, "team", raising=False)
    own = importlib.import_module("team").Team
    async with system.open_device("cpu", options=options(preload=("team",))) as device:
        assert (await open_launcher(system)).ahead.judge("team") == ("fully", None)
        program: Any = await ta.open_program(device, own, np.zeros(1))
        for _ in range(3):
            assert await program.ask("compute") == expected
            # Its library had its threads in the process that the worker was forked from.
            assert await program.ask("threads_at_import") >= threads
            await replace_worker(device)
            assert is_fork(device.dispatch.process.pid)
        assert await program.ask("compute") == expected
        await program.aclose()
    assert len(modules.importers("team")) == 2


@pytest.mark.parametrize("value", [0, None, "yes"])
def test_trust_is_a_plain_word(value: Any) -> None:
    with pytest.raises(TypeError, match="trusted"):
        ta.Preload("torch", trusted=value)
    assert ta.DeviceOptions(preload=("torch", ta.Preload("timm", trusted=True))).preload[1] != "timm"
