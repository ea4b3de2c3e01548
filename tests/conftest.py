"""What all tests share: a system, a device, and the rule that a test leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Container, Generator, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import attrs
import hypothesis
import pytest

# Test folders are no packages: what several modules share is imported by its own name.
sys.path.insert(0, str(Path(__file__).parent))

import machines  # noqa: F401  before anything looks at this machine
import third_backend
from chosen import BACKEND, IS_STAND_IN
from driver_spy import Spy, spy_on
from kept_launcher import KeptLink
from recorded import OperationRecorder
from replayed import ReplayRecorder
from timeouts import *  # noqa: F403  hooks of pytest

import trio_accel as ta
import trio_accel.fft
import trio_accel.nn
import trio_accel.random
import trio_accel.sparse
import trio_accel.tensor  # so that what they declare is known to all tests
from trio_accel.actors._cell import Cell
from trio_accel.backends import resolve
from trio_accel.backends.base import AccelDevice, Isolation, NotSupportedError
from trio_accel.backends.base.kit.fast_paths import FastPaths, use_fast_paths
from trio_accel.backends.cpu import CpuBackend
from trio_accel.backends.cuda import CudaBackend
from trio_accel.devices.launcher._launcher import Launcher, WorkerProcess

# Trio keeps the threads of `to_thread.run_sync` for a while, to use them again.
_CACHED = "Trio thread "
_NOTIFIER = " notifier"
_JOIN = 30.0
_SELF = Path("/proc/self")
_TESTS = Path(__file__).parent
# Where every test is a case of its own, and none has parameters for their number's sake.
WHOLE = ("actors", "otp", "test_counts.py", "test_docs.py", "test_docs_examples.py", "test_reference.py")
# These are in every sample, because they hold each function with a gradient to differences.
EACH_RUN = ("test_each_function.py",)

# Where the numbers are looked at, and not where they come from.
NUMBERS_OF_ALL = ("arrays", "fft", "jit", "linalg", "random", "sparse", "tensor")
NUMBERS = (*NUMBERS_OF_ALL, "nn")  # which the stand-in's sample leaves out

if BACKEND == third_backend.BACKEND:
    third_backend.register_third()

# A backend of another distribution has what it has: the tests ask it.
IS_FROM_OUTSIDE = BACKEND not in ("cpu", "cuda")

# A sample has one of so many functions of numbers; that of the CPU has all (D96).
SHARE = {"cpu": 1, "cuda": 4 if IS_STAND_IN else 1}.get(BACKEND, 2)

# `--brief` runs a test function of this many, and none that takes long or needs a machine that is idle.
BRIEF_SHARE = 5
# Tests that every sample has: together they kill nearly all mutants of all rooms (D234).
LISTED = frozenset((_TESTS / "mutants" / "sample.txt").read_text(encoding="utf-8").splitlines())
NOT_BRIEF = ("alone", "docs", "examples", "gpu", "lint", "ray", "slow")

# Markers of tests that have launcher processes of their own.
OWN_LAUNCHER = ("own_launcher", "alone", "gpu")


# A machine with other work to do is no failure.
hypothesis.settings.register_profile("without a deadline", deadline=None)
hypothesis.settings.load_profile("without a deadline")

# A shell starts programs in the background with SIGINT ignored, and tests interrupt themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--isolation",
        choices=["inline", "process"],
        default=os.environ.get("TRIO_ACCEL_TEST_ISOLATION", "inline"),
        help="where the contexts of devices live, in tests that do not choose themselves",
    )
    parser.addoption(
        "--slow-paths",
        action="store_true",
        help="turn every fast path off, in tests that do not choose themselves",
    )
    parser.addoption(
        "--sample",
        type=int,
        default=0,
        metavar="N",
        help="run at most N parameter sets of each test of these folders, chosen by hash; 0 runs all",
    )
    parser.addoption(
        "--brief",
        action="store_true",
        help=f"run one parameter set of every {BRIEF_SHARE}th test function, without those that take long",
    )
    parser.addoption(
        "--share",
        type=int,
        default=1,
        metavar="N",
        help="run every Nth test function, chosen by hash, and the tests of tests/mutants/sample.txt",
    )
    parser.addoption(
        "--record-operations",
        type=Path,
        metavar="FILE",
        help="write which functions passed with which dtypes; see docs/reference/operations.md",
    )
    parser.addoption(
        "--record-replay",
        action="store_true",
        help="record each device of each test, and replay it when the test has passed",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--brief"):
        config.option.sample = config.getoption("--sample") or 1
        config.option.share = BRIEF_SHARE
    if config.getoption("--slow-paths"):
        use_fast_paths(FastPaths.disabled())
    file: Path | None = config.getoption("--record-operations")
    if file is not None:
        config.pluginmanager.register(OperationRecorder(file, is_worker=hasattr(config, "workerinput")))
    if config.getoption("--record-replay"):
        config.pluginmanager.register(ReplayRecorder())


@pytest.hookimpl(trylast=True)  # when all have given their parameters
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Leave out most of what a sample would: to make an item takes longer than to choose it."""
    config, path = metafunc.config, metafunc.definition.path
    size: int = config.getoption("--sample")
    # Names of parameter sets that are asked for are looked for among all of them.
    if (
        not size
        or config.getoption("-k")
        or _is_of(path, (*WHOLE, *EACH_RUN))
        or any("[" in each for each in config.args)
    ):
        return
    calls: list[Any] = metafunc._calls  # pytest has no public way
    # What has a marker of its own may be left out by that.
    plain = [call for call in calls if not call.marks]
    plain.sort(key=lambda call: _place_in_sample(path, f"{metafunc.definition.nodeid}[{call.id}]"))
    left_out = {id(call) for call in plain[size:] if f"{metafunc.definition.nodeid}[{call.id}]" not in LISTED}
    metafunc._calls = [call for call in calls if id(call) not in left_out]


@pytest.hookimpl(trylast=True)  # when -m and -k have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    size: int = config.getoption("--sample")
    if not size:
        return
    if (share := config.getoption("--share")) > 1:
        kept = {item for item in items if _is_in_share(item, share)}
        if config.getoption("--brief"):
            kept = {item for item in kept if not any(map(item.get_closest_marker, NOT_BRIEF))}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    # The same ones in each run and in each process, and others on another backend.
    functions: dict[str, list[pytest.Item]] = {}
    chosen: set[pytest.Item] = set()
    for item in items:
        if _is_of(item.path, (*WHOLE, *EACH_RUN)):
            chosen.add(item)
        else:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, those in functions.items():
        if not _is_elsewhere(name, those[0].path):
            those.sort(key=lambda item: _place_in_sample(item.path, item.nodeid))
            chosen.update([*those[:size], *(item for item in those if item.nodeid in LISTED)])
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
    for function in {_function_of(item) for item in items if not _is_of(item.path, WHOLE)}:
        _draw_fewer_examples(function)


def _is_of(path: Path, folders: Container[str]) -> bool:
    parts = path.relative_to(_TESTS).parts
    return parts[0] in folders or parts[-1] in folders


def _function_of(item: pytest.Item) -> Any:
    function = getattr(item, "obj", None)
    return getattr(function, "__func__", function)


def _draw_fewer_examples(function: Any) -> None:
    """Have Hypothesis draw a third of the examples that a test asks for."""
    # Its one public way is a decorator, of which a test can have one.
    name = "_hypothesis_internal_use_settings"
    if chosen := getattr(function, name, None):
        setattr(function, name, hypothesis.settings(chosen, max_examples=chosen.max_examples // 3 + 1))


def _is_in_share(item: pytest.Item, share: int) -> bool:
    """Return whether a share of the test functions has a test: the same ones each time, from all folders."""
    name = item.nodeid.partition("[")[0]
    return item.nodeid in LISTED or _is_of(item.path, EACH_RUN) or not zlib.crc32(name.encode()) % share


def _is_elsewhere(name: str, path: Path) -> bool:
    """Tell whether a sample has a test of numbers on other backends only."""
    return _is_of(path, NUMBERS_OF_ALL) and zlib.crc32(name.encode()) % SHARE > 0


def _place_in_sample(path: Path, nodeid: str) -> tuple[bool, int]:
    """Sort parameter sets. Of numbers, most functions are sampled inline, as workers take long."""
    name = zlib.crc32(nodeid.partition("[")[0].encode())
    last = _is_of(path, NUMBERS) and name % 12 > 0 and "process" in nodeid
    return last, zlib.crc32((BACKEND + nodeid).encode())


@pytest.fixture(autouse=True)
def _the_backend_has_the_isolation(request: pytest.FixtureRequest) -> None:
    spec = getattr(request.node, "callspec", None)
    wanted = None if spec is None else spec.params.get("isolation")
    if isinstance(wanted, str) and IS_FROM_OUTSIDE:
        info = resolve(BACKEND)[1]
        if wanted not in info.isolations:
            pytest.skip(f"{info.name} has the isolations {info.isolations}")


# Under a name of its own, because `pytest_runtest_call` would replace the hook of `timeouts`.
@pytest.hookimpl(wrapper=True, specname="pytest_runtest_call")
def pytest_skip_refused(item: pytest.Item) -> Generator[None, object, object]:
    """Skip a test of an operation that a backend from outside refuses, with its refusal."""
    try:
        return (yield)
    except BaseException as error:
        refusals = [one for one in _leaves(error) if isinstance(one, NotSupportedError)]
        if IS_FROM_OUTSIDE and refusals and refusals[0].backend == BACKEND:
            pytest.skip(f"refused: {refusals[0]}")
        raise


def _leaves(error: BaseException) -> Iterable[BaseException]:
    """Yield what an error is made of: itself or the errors of its groups, each with its causes."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
        return
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Watches a function of the driver until the end of the test."""
    return partial(spy_on, monkeypatch)


@attrs.frozen
class Remains:
    """What the kernel says that a test could leave in this process and below it."""

    children: frozenset[int]
    descriptors: frozenset[tuple[str, str]]
    mapped: frozenset[str]
    at_the_end: ClassVar[frozenset[str] | None] = None
    """What was mapped when the last test had ended."""

    @classmethod
    def before(cls) -> Remains:
        # Between tests nothing is mapped, and to list all that is takes the kernel a millisecond.
        return cls.now(cls.at_the_end)

    @classmethod
    def now(cls, mapped: frozenset[str] | None = None) -> Remains:
        if not _SELF.exists():
            return cls(frozenset(), frozenset(), frozenset())
        return cls(_children(), _descriptors(), _shared_memory() if mapped is None else mapped)

    def check(self, before: Remains) -> None:
        left = self.children - before.children
        assert not left, f"processes are alive, or were not reaped: {sorted(map(_described, left))}"
        left_open = self.descriptors - before.descriptors
        assert not left_open, f"descriptors are open: {sorted(left_open)}"
        Remains.at_the_end = self.mapped
        left_mapped = self.mapped - before.mapped
        assert not left_mapped, f"shared memory is mapped: {sorted(left_mapped)}"


def _described(process: int) -> str:
    try:
        # Number, name and state.
        return (_SELF.parent / str(process) / "stat").read_text().partition(" ")[2][:40] + f" ({process})"
    except OSError:
        return f"{process}, which has ended since"


def _children() -> frozenset[int]:
    try:
        # Says at once that there is none, as nearly always.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()
    found: set[int] = set()
    # Twice, because the kernel hands the children of a thread that ends to another one, whose list was read.
    for _ in range(2):
        for task in (_SELF / "task").iterdir():
            # A thread may have ended since it was listed.
            with suppress(FileNotFoundError, ProcessLookupError):
                found.update(map(int, (task / "children").read_text().split()))
    return frozenset(found)


def _descriptors() -> frozenset[tuple[str, str]]:
    """Sockets, pipes, shared memory and the like; files are what libraries and pytest open once."""
    found: set[tuple[str, str]] = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            # The one of the listing itself.
            continue
        # CUDA's runtime opens an event descriptor at the first use by a library; this package opens none.
        is_of_driver = (
            target == "anon_inode:[eventfd]" and BACKEND not in ("cpu", "third") and not IS_STAND_IN
        )
        if not is_of_driver and (not target.startswith("/") or target.startswith("/memfd:")):
            found.add((number, target))
    return frozenset(found)


def _shared_memory() -> frozenset[str]:
    maps = (_SELF / "maps").read_bytes()
    if b"memfd:" not in maps:
        return frozenset()
    # Compiled expressions stay loaded.
    lines = [line for line in maps.decode().splitlines() if "memfd:accel code" not in line]
    return frozenset(line for line in lines if "memfd:" in line)


@pytest.fixture(scope="session", autouse=True)
def _driver_is_open() -> Generator[None, None, None]:
    """A driver opens descriptors with a process's first context: no test is to have left them."""
    if IS_FROM_OUTSIDE:
        backend, info = resolve(BACKEND)
        if info.is_accelerator and info.backend != third_backend.BACKEND:
            assert backend.open_device(info.index, memory_limit=None).close(10.0)
    if BACKEND != "cuda" or IS_STAND_IN:
        yield
        return
    from cuda.bindings import driver

    def call(result: Any) -> Any:
        assert not int(result[0]), result[0]
        return result[1] if len(result) > 1 else None

    call(driver.cuInit(0))
    device = call(driver.cuDeviceGet(0))
    call(driver.cuDevicePrimaryCtxRetain(device))
    yield
    call(driver.cuDevicePrimaryCtxRelease(device))


@pytest.fixture(scope="session", autouse=True)
def _no_launcher_is_kept() -> Generator[None, None, None]:
    yield
    KeptLink.end()


@pytest.fixture(autouse=True)
def nothing_left_behind(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Generator[None, None, None]:
    """Fail a test that leaves a thread, process, descriptor, open device, block of memory or live actor."""
    if any(map(request.node.get_closest_marker, OWN_LAUNCHER)):
        # Such tests look for launchers among the children of this process, or measure.
        KeptLink.end()
    else:
        KeptLink.prepare()
        monkeypatch.setattr("trio_accel.devices.launcher._launcher.LauncherLink", KeptLink)
    # What is alive by now is no business of this test, and need not be looked through again.
    gc.freeze()
    # Fixtures of a session were set up before, and what an earlier test has left is there too.
    before = Remains.before()
    threads = set(threading.enumerate())
    opened: list[Any] = []
    workers: list[WorkerProcess] = []
    _remember(monkeypatch, opened, workers)
    yield
    # A device of a fixture of several tests starts its notifier at the first request that takes long.
    own = {f"{device.info.name}{_NOTIFIER}" for device in opened}
    for thread in set(threading.enumerate()) - threads:
        is_of_a_fixture = thread.name.endswith(_NOTIFIER) and thread.name not in own
        if not thread.name.startswith(_CACHED) and not is_of_a_fixture:
            # A stream that is closed may need a moment to end.
            thread.join(_JOIN)
            assert not thread.is_alive(), f"thread {thread.name!r} is alive"
    for device in opened:
        assert device.is_closed, f"device {device.info.name} is open"
        assert device.memory().blocks == 0, f"device {device.info.name} holds {device.memory()}"
    opened.clear()
    assert all(worker.is_dead for worker in workers), f"workers are alive: {workers}"
    workers.clear()
    gc.collect()
    # `type`, not `isinstance`: proxies among the objects must not be woken.
    alive = [item.path for item in gc.get_objects() if type(item) is Cell and item.terminated is None]
    assert not alive, f"actors are alive: {alive}"
    # A process may need a moment to end, too.
    deadline = time.monotonic() + _JOIN
    while _children() - before.children and time.monotonic() < deadline:
        time.sleep(0.01)
    Remains.now().check(before)


def _remember(monkeypatch: pytest.MonkeyPatch, opened: list[Any], workers: list[WorkerProcess]) -> None:
    """Have all that is opened noted down."""
    start_worker = Launcher.start_worker

    def remembering(open_device: Callable[..., AccelDevice]) -> Callable[..., AccelDevice]:
        def remember(*arguments: Any, **more: Any) -> AccelDevice:
            device = open_device(*arguments, **more)
            opened.append(device)
            return device

        return remember

    async def remember_worker(self: Launcher, *order: Iterable[Any], **more: Iterable[Any]) -> WorkerProcess:
        worker = await start_worker(self, *order, **more)
        workers.append(worker)
        return worker

    outside = [type(resolve(BACKEND)[0])] if IS_FROM_OUTSIDE else []
    for backend in dict.fromkeys([CpuBackend, CudaBackend, *outside]):
        monkeypatch.setattr(backend, "open_device", remembering(backend.open_device))
    monkeypatch.setattr(Launcher, "start_worker", remember_worker)


@pytest.fixture
async def system() -> AsyncGenerator[ta.System, None]:
    """An open system."""
    async with ta.open_system("test") as system:
        yield system


@pytest.fixture
def isolation(request: pytest.FixtureRequest) -> Isolation:
    """Where the context of the `device` lives."""
    chosen: Isolation = request.config.getoption("--isolation")
    return chosen


@pytest.fixture
async def device(system: ta.System, isolation: Isolation) -> AsyncGenerator[ta.Device, None]:
    """The device that tests run on, open."""
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as device:
        yield device
