"""Workers forked from a launcher with their modules imported: like fresh interpreters, or fresh ones."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import trio
import trio.testing
from isolated import options
from processes import LAUNCHER, command, descriptors, launcher, until, wait_dead, workers

import trio_accel as ta
from trio_accel.devices.launcher._launcher import Launcher, open_launcher
from trio_accel.devices.launcher._link import LauncherLink

pytestmark = [pytest.mark.no_device, pytest.mark.own_launcher]

# Each worker writes JSON to its first descriptor.
SAY = (
    "import json, os, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "say = lambda what: os.write(3, json.dumps(what).encode()); "
)
# Who has imported it: the launcher, or the worker itself.
WHO = "import os\nPID = os.getpid()\n"
WHO_IMPORTED = SAY + "import ahead; say([ahead.PID, os.getppid(), os.getpid()])"

FACTS = """
import gc, sys, threading, warnings
say([
    __name__, sorted(set(globals()) - {"__builtins__", "__annotations__"}),
    __import__("__main__").__dict__ is globals(),
    sys.argv, sys.executable, sys.prefix, sys.base_prefix, sys.exec_prefix, sys.dont_write_bytecode,
    threading.current_thread() is threading.main_thread(), threading.active_count(),
    gc.isenabled(), sys.stdin.read(), sys.stdout.encoding, sys.stderr.encoding,
    [repr(each) for each in warnings.filters],
])
"""

Run: TypeAlias = Callable[..., Awaitable[Any]]


@pytest.fixture
async def workshop(system: ta.System) -> Launcher:
    """The launcher of the system."""
    return await open_launcher(system)


async def run_in(
    workshop: Launcher, code: str, *arguments: str, preload: tuple[str, ...] = ("ahead",)
) -> Any:
    """Run a program in a worker; returns its message, if any, or else its end."""
    reader, writer = os.pipe()
    try:
        path = json.dumps(sys.path)
        worker = await workshop.start_worker(("-c", code, path, *arguments), [writer], preload)
    finally:
        os.close(writer)
    how = await worker.wait()
    said = os.read(reader, 1 << 16)
    os.close(reader)
    return json.loads(said) if said else how


@pytest.fixture
def run(workshop: Launcher) -> Run:
    """`run_in` the launcher of the system."""
    return partial(run_in, workshop)


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes the module ``ahead``, which only workers and launchers import."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> None:
        (tmp_path / "ahead.py").write_text(source)

    return write


ROOM = """
def room(deep):
    try:
        return room(deep + 1)
    except RecursionError:
        return deep
say(room(0))
"""


async def test_any_number_of_lists_leaves_calls_their_room(
    workshop: Launcher, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each template is a fork inside of the frames of the one before, and so are its workers."""
    monkeypatch.syspath_prepend(tmp_path)
    found: list[int] = []
    for number in range(9):
        (tmp_path / f"list_{number}.py").write_text("")
        await workshop.import_ahead((f"list_{number}",), ("colorsys",))
        found.append(await run(SAY + ROOM, preload=("colorsys",)))
    assert min(found) >= found[0]


async def test_the_launcher_imports_once_and_its_forks_have_it(
    run: Run, ahead: Callable[[str], None]
) -> None:
    ahead(WHO)
    found = [await run(WHO_IMPORTED) for _ in range(3)]
    assert {(importer, parent) for importer, parent, _ in found} == {(launcher(), launcher())}
    assert len({pid for _, _, pid in found}) == 3
    assert len(os.listdir(f"/proc/{launcher()}/task")) == 1
    assert os.readlink(f"/proc/{launcher()}/cwd") == "/"


async def test_a_worker_without_modules_is_fresh_next_to_it(run: Run, ahead: Callable[[str], None]) -> None:
    ahead(WHO)
    await run(WHO_IMPORTED)
    program = SAY + "import sys; say('ahead' in sys.modules)"
    assert await run(program) is True
    assert await run(program, preload=()) is False


async def test_the_path_is_that_of_the_program_now(
    workshop: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; sys.exit('/somewhere' in sys.path)"
    for expected in (0, 1):
        worker = await workshop.start_worker(("-c", code), preload=("colorsys",))
        assert await worker.wait() == f"exited with code {expected}"
        monkeypatch.setattr(sys, "path", [*sys.path, "/somewhere"])


async def test_more_modules_may_be_named_later(
    run: Run, ahead: Callable[[str], None], tmp_path: Path
) -> None:
    ahead(WHO)
    assert (await run(WHO_IMPORTED))[0] == launcher()
    (tmp_path / "later.py").write_text(WHO)
    program = SAY + "import ahead, later; say([ahead.PID, later.PID])"
    assert await run(program, preload=("ahead", "later")) == [launcher()] * 2


@pytest.mark.parametrize(
    "code",
    [
        "",
        "import sys; sys.exit('said at the end')",
        "import sys; sys.exit(300)",
        "import sys; sys.exit(-1)",
        "import sys; sys.exit(True)",
        "import sys; sys.exit()",
        "def fail():\n    1 / 0\nfail()",
        "raise ExceptionGroup('two', [ValueError('one'), KeyError('other')])",
        "not a program",
        "import sys; sys.stderr.write('no end of line')",
        "import os; os.abort()",
    ],
)
async def test_it_ends_as_a_fresh_interpreter_does(
    workshop: Launcher, capfd: pytest.CaptureFixture[str], code: str
) -> None:
    ends = []
    for preload in ((), ("colorsys",)):
        worker = await workshop.start_worker(("-c", code), preload=preload)
        how = await worker.wait()
        ends.append((how, capfd.readouterr()))
    assert ends[0] == ends[1]


async def test_it_finds_the_state_of_a_fresh_interpreter(run: Run) -> None:
    program = SAY + FACTS
    fresh = await run(program, "one", "two", preload=())
    assert fresh[3] == ["-c", "one", "two"]
    assert await run(program, "one", "two", preload=("colorsys",)) == fresh


async def test_each_has_random_numbers_of_its_own(run: Run) -> None:
    program = SAY + "import random, numpy; say([random.random(), numpy.random.random()])"
    found = [await run(program, preload=("numpy.random", "random")) for _ in range(4)]
    assert len({number for pair in found for number in pair}) == 8
    assert random.random() not in found[0]


# The work of a worker's BLAS: products by NumPy and by SciPy, which have a copy of it each.
MULTIPLY = """
import os, hashlib, numpy, scipy.linalg.blas
x = numpy.random.default_rng(5).random((300, 300))
products = x @ x, scipy.linalg.blas.dgemm(1.0, x, x)
digests = [hashlib.sha256(product.tobytes()).hexdigest() for product in products]
say([*digests, len(os.listdir("/proc/self/task"))])
"""


@pytest.mark.parametrize("name", [None, "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"])
async def test_a_blas_computes_as_in_a_fresh_interpreter(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    for other in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        # The first name has precedence, so a variable of the caller's shell would hide the second.
        monkeypatch.delenv(other, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "1")
    modules = ("numpy", "scipy.linalg")
    fresh = await run(SAY + MULTIPLY, preload=())
    assert [await run(SAY + MULTIPLY, preload=modules) for _ in range(2)] == [fresh] * 2
    assert len(os.listdir(f"/proc/{launcher()}/task")) == 1
    if name is not None:
        assert fresh[-1] == 1


async def test_threads_of_a_fork_may_need_a_blas_at_once(run: Run) -> None:
    """The first of them starts the threads of the BLAS."""
    program = SAY + (
        "import threading, numpy, scipy.linalg.blas\n"
        "x = numpy.eye(300)\n"
        "start, right = threading.Barrier(4), []\n"
        "def multiply(product):\n"
        "    start.wait()\n"
        "    right.append((product(x, x) == x).all())\n"
        "by = [numpy.matmul, lambda x, y: scipy.linalg.blas.dgemm(1.0, x, y)] * 2\n"
        "threads = [threading.Thread(target=multiply, args=(product,)) for product in by]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "say([*map(bool, right)])\n"
    )
    for _ in range(5):
        assert await run(program, preload=("numpy", "scipy.linalg")) == [True] * 4


async def test_threads_that_end_before_a_fork_are_no_reason(run: Run, ahead: Callable[[str], None]) -> None:
    """As OpenBLAS ends its own."""
    ahead(
        WHO + "import threading\n"
        "is_over = threading.Event()\n"
        "thread = threading.Thread(target=is_over.wait, daemon=True)\n"
        "thread.start()\n"
        "os.register_at_fork(before=lambda: (is_over.set(), thread.join()))\n"
    )
    importer, parent, _ = await run(WHO_IMPORTED)
    assert importer == parent == launcher()


async def test_changes_of_the_environment_by_a_module_stay(
    run: Run, ahead: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead("import os\nos.environ['ADDED'] = 'here'\nos.environ.pop('TAKEN')\n")
    monkeypatch.setenv("TAKEN", "there")
    monkeypatch.setenv("LEFT", "before")
    program = SAY + "say([os.getenv(name) for name in ('ADDED', 'TAKEN', 'LEFT')])"
    assert await run(program) == ["here", None, "before"]
    monkeypatch.setenv("LEFT", "after")
    assert await run(program) == ["here", None, "after"]


async def test_modules_are_found_from_the_directory_of_the_program(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ahead.py").write_text(WHO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert (await run(WHO_IMPORTED))[0] == launcher()


def make_environment(folder: Path) -> Path:
    """Make a virtual environment with a module that only a finder finds; returns its `site-packages`."""
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    base = Path(sys._base_executable)  # type: ignore[attr-defined]
    (folder / "bin" / "python").symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    (folder / "elsewhere.py").write_text(WHO + "import sys\nPREFIX = sys.prefix\n")
    (packages / "editable.pth").write_text("import editable_finder; editable_finder.install()\n")
    (packages / "editable_finder.py").write_text(
        "import sys\n"
        "from importlib.util import spec_from_file_location\n"
        "class Finder:\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        if name == 'ahead':\n"
        f"            return spec_from_file_location(name, {str(folder / 'elsewhere.py')!r})\n"
        "def hook(path):\n"
        "    if path == '__editable__.ahead.finder.__path_hook__':\n"
        "        return Finder\n"
        "    raise ImportError\n"
        "def install():\n"
        "    sys.meta_path.append(Finder)\n"
        "    sys.path_hooks.append(hook)\n"
        "    sys.path.append('__editable__.ahead.finder.__path_hook__')\n"
    )
    return packages


async def test_an_editable_install_in_a_virtual_environment_is_found(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages = make_environment(tmp_path)
    path = [entry for entry in sys.path if "site-packages" not in entry]
    monkeypatch.setattr(sys, "path", [*path, str(packages), "__editable__.ahead.finder.__path_hook__"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    program = SAY + "import ahead; say([ahead.PID, ahead.PREFIX])"
    assert await run_in(await open_launcher(system), program) == [launcher(), str(tmp_path)]


async def test_the_path_of_the_interpreter_may_be_any(
    system: ta.System, ahead: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interpreter removes ``..`` from the path that it is started by."""
    home = Path(sys.executable).parent
    monkeypatch.setattr(sys, "executable", f"{home}/../{home.name}/{Path(sys.executable).name}")
    ahead(WHO)
    importer, parent, _ = await run_in(await open_launcher(system), WHO_IMPORTED)
    assert importer == parent == launcher()


async def test_the_interpreter_of_another_environment_is_another(
    run: Run, ahead: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All are links to one file, but find other packages."""
    ahead(WHO)
    await run(WHO_IMPORTED)
    home = Path(sys.executable).parent
    (tmp_path / "python").symlink_to(sys._base_executable)  # type: ignore[attr-defined]
    (tmp_path / "bin").symlink_to(home)
    for other in (tmp_path / "python", tmp_path / "bin" / Path(sys.executable).name):
        monkeypatch.setattr(sys, "executable", str(other))
        importer, _, pid = await run(WHO_IMPORTED)
        assert importer == pid


FRESH: dict[str, tuple[str, str]] = {
    "a thread": ("import threading\nthreading.Thread(target=threading.Event().wait).start()\n", "threads"),
    "an open file": ("FILE = open('/dev/null')\n", "a file open"),
    "an error": ("if os.getppid() != os.getsid(0): 1 / 0\n", "ZeroDivisionError"),
    "an exit": ("if os.getppid() != os.getsid(0): raise SystemExit\n", "SystemExit"),
}


@pytest.mark.parametrize("case", FRESH)
async def test_the_interpreter_is_fresh_if_a_fork_would_not_do(
    run: Run, ahead: Callable[[str], None], caplog: pytest.LogCaptureFixture, case: str
) -> None:
    source, why = FRESH[case]
    ahead(WHO + source)
    caplog.set_level(logging.WARNING, "trio_accel.devices")
    for _ in range(2):
        importer, parent, pid = await run(WHO_IMPORTED + "; os._exit(0)")
        assert (importer, parent) == (pid, launcher())
    (message,) = [record.getMessage() for record in caplog.records if "fresh" in record.getMessage()]
    assert why in message


async def test_a_launcher_with_a_thread_ends_in_order(ahead: Callable[[str], None]) -> None:
    ahead(FRESH["a thread"][0])
    link = await LauncherLink.open()
    order = {
        "arguments": [sys.executable, "-c", ""],
        "environment": {},
        "descriptors": 1,
        "preload": ["ahead"],
        "path": sys.path,
    }
    directory = os.open(".", os.O_PATH)
    link.send("start", 1, order, [directory])
    os.close(directory)
    reports = [await link.receive() for _ in range(4)]
    assert [report.kind for report in reports] == ["importing", "fresh", "started", "exited"]
    os.close(reports[2].descriptors[0])
    assert await link.close() == "exited with code 0"


async def test_a_missing_module_is_the_workers_error(
    run: Run, capfd: pytest.CaptureFixture[str], ahead: Callable[[str], None]
) -> None:
    for _ in range(2):
        assert await run("import not_there", preload=("not_there",)) == "exited with code 1"
    assert capfd.readouterr().err.count("ModuleNotFoundError: No module named 'not_there'") == 2
    ahead(WHO)
    # Others are none the worse for it.
    assert (await run(WHO_IMPORTED))[0] == launcher()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTHONOPTIMIZE", "1"),
        ("PYTHONWARNINGS", "error"),
        ("LD_LIBRARY_PATH", "/nowhere"),
        ("MALLOC_ARENA_MAX", "1"),
        ("OPENBLAS_NUM_THREADS", "7"),
        ("OMP_NUM_THREADS", "7,1"),
    ],
)
async def test_settings_read_at_the_start_of_a_process_are_in_force(
    run: Run, ahead: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    ahead(WHO)
    importer, _, pid = await run(WHO_IMPORTED)
    assert importer == launcher()
    with monkeypatch.context() as changed:
        changed.setenv(name, value)
        importer, _, pid = await run(WHO_IMPORTED)
        assert importer == pid
    assert (await run(WHO_IMPORTED))[0] == launcher()


async def test_options_of_the_interpreter_are_in_force(workshop: Launcher) -> None:
    code = "import sys; sys.exit(sys.flags.optimize)"
    worker = await workshop.start_worker(("-OO", "-c", code), preload=("colorsys",))
    assert await worker.wait() == "exited with code 2"


async def test_faults_are_traced_if_the_environment_asks_for_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.delenv("PYTHONFAULTHANDLER", raising=False)
    assert await run(program, preload=("colorsys",)) == "was killed by SIGSEGV"
    assert "Fatal Python error" not in capfd.readouterr().err
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    assert await run(program, preload=("colorsys",)) == "was killed by SIGSEGV"
    assert "Fatal Python error" in capfd.readouterr().err


async def test_an_import_that_kills_the_launcher_is_not_tried_again(
    system: ta.System, run: Run, ahead: Callable[[str], None]
) -> None:
    ahead(WHO + "import signal\nif os.getpid() == os.getsid(0): os.kill(os.getpid(), signal.SIGSEGV)\n")
    first = launcher()
    for _ in range(2):
        importer, parent, pid = await run(WHO_IMPORTED)
        assert importer == pid
        assert parent == launcher() != first
    assert system.tree().find("test/launcher/process").restarts == 1
    assert "SIGSEGV" in str(system.tree().find("test/launcher/process").last_error)


async def test_an_import_that_hangs_ends_the_launcher(
    system: ta.System, ahead: Callable[[str], None]
) -> None:
    ahead(
        WHO + "import signal\n"
        "if os.getpid() == os.getsid(0):\n"
        # Not in half a minute, but as it would be then.
        "    assert 0 < signal.alarm(0) <= 30\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
        "    while True: signal.pause()\n"
    )
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        importer, _, pid = await run_in(await open_launcher(system), WHO_IMPORTED)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert importer == pid
    assert "was killed by SIGALRM" in str(system.tree().find("test/launcher/process").last_error)


async def test_no_alarm_is_left_to_the_launcher(run: Run, ahead: Callable[[str], None]) -> None:
    # Forks do not inherit it, because the launcher's state is seen before.
    ahead(
        "import os, signal\n"
        "LEFT = []\n"
        "os.register_at_fork(before=lambda: LEFT.append(signal.getitimer(signal.ITIMER_REAL)[0]))\n"
    )
    assert await run(SAY + "import ahead; say(ahead.LEFT)") == [0.0]


async def test_the_death_of_a_launcher_with_imports_is_no_reason(
    workshop: Launcher, run: Run, ahead: Callable[[str], None]
) -> None:
    ahead(WHO)
    first = launcher()
    sleeper = await workshop.start_worker(("-c", "import signal; signal.pause()"), preload=("ahead",))
    pidfd = os.pidfd_open(sleeper.pid)
    os.kill(first, signal.SIGSTOP)

    async def find_importer() -> None:
        # The next one imports again.
        assert (await run(WHO_IMPORTED))[0] == launcher() != first

    async with trio.open_nursery() as nursery:
        # Ordered of the first.
        nursery.start_soon(find_importer)
        await trio.testing.wait_all_tasks_blocked()
        os.kill(first, signal.SIGKILL)
    await wait_dead(pidfd)
    os.close(pidfd)
    assert await sleeper.wait() == "ended with its launcher"


async def test_a_device_recovers_by_a_fork(system: ta.System) -> None:
    before = descriptors()
    async with system.open_device("cpu", options=options()) as device:
        x = await device.put(np.arange(9.0).reshape(3, 3))
        for generation in range(2, 5):
            # Forks have the launcher's command line, and fresh interpreters that of the worker's program.
            assert LAUNCHER in command(device.dispatch.process.pid)
            device.dispatch.process.kill()
            await until(lambda expected=generation: device.generation == expected)
            product = await (await device.ask(ta.linalg.Matmul(x, x))).to_host()
            np.testing.assert_array_equal(
                product, np.arange(9.0).reshape(3, 3) @ np.arange(9.0).reshape(3, 3)
            )
        assert workers(launcher()) == {device.dispatch.process.pid}
    assert [entry for entry in set(descriptors().values()) - set(before.values()) if "memfd" in entry] == []
