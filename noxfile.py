"""Sessions: `nox -l` lists them, `nox` runs the default ones.

All sessions work in one environment, which the session `env` makes and the others require: the project is
installed once per run, whatever is asked for. `nox -R` uses the environment of the last run as it is.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, ClassVar

import nox

nox.needs_version = ">=2025.10.16"  # `download_python` of a session
nox.options.sessions = [
    *("lint", "ahead", "tests", "machines(machine='small')", "stand_in", "third"),
    *("types", "docs", "examples", "array_api_sample"),
]
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
# What knows no backend by name.
STAND_IN = (
    *("arrays", "backends", "collectives", "devices", "fft", "graphs", "interop", "jit", "linalg"),
    *("nn", "programs", "random", "sparse", "tensor", "testing", "weights"),
)
# What holds any backend to its protocols, and to the numbers of the functions that all backends are to have.
CONFORMANCE = (
    *(f"tests/{folder}" for folder in ("arrays", "backends", "fft", "linalg")),
    *(f"tests/devices/test_{module}.py" for module in ("hazards", "memory", "out_arrays")),
    *(f"tests/jit/test_{module}.py" for module in ("elementwise", "indices", "reductions")),
)
# What else holds for it: whole runs have these, too.
MORE_CONFORMANCE = tuple(f"tests/{folder}" for folder in ("jit", "nn", "random", "sparse", "tensor"))
# And what has no device, or one of its own.
NO_DEVICE = (
    "tests/backends/cpu",
    "tests/backends/cuda/runtime",
    "tests/backends/cuda/test_*",
    "*/test_launcher*",
    "*/test_channel.py",
    "*/test_wire*",
)
# What is mostly the same with any backend: how processes start and end, who waits and who has the blame, and
# functions that are made of others.
OF_ANY_BACKEND = (
    *("tests/interop", "tests/nn", "tests/programs", "tests/testing"),
    *(f"tests/devices/test_{module}.py" for module in ("open_device", "statistics", "submit")),
    *(
        f"tests/devices/worker/test_{module}.py"
        for module in (
            *("blame", "children_of_workers", "death_of_the_application", "imports_ahead"),
            *("isolated_start", "requests", "staged_copies"),
        )
    ),
)
# Tests mostly wait for workers that start. Those marked `alone` measure times, and run behind all others.
TWO_AT_A_TIME = ("-n", "2", "--dist", "worksteal")
# Where nothing runs beside them.
THREE_AT_A_TIME = ("-n", "3", "--dist", "worksteal")
# Of a test function, so many parameter sets are run, and none that takes long; `tests_full` runs all.
SAMPLE = ("--sample", "1")
# The example service is under load for so long, and not for its own 25 seconds.
SHORT_LOAD = {"TRIO_ACCEL_SERVICE_SECONDS": "6"}
ALONE = "mark.alone"
# Machines that tests/machines can make of this one, and the tests of what asks for processor, cores, memory.
MACHINES = ("small", "large")
OF_THE_MACHINE = (
    "tests/backends/cpu",
    "tests/backends/test_fft.py",
    "tests/benchmarks/test_command.py",
    "tests/benchmarks/test_harness.py",
    "tests/benchmarks/test_processors.py",
    "tests/cli/test_info.py",
    "tests/devices/test_host_pool.py",
    "tests/interop/test_scipy_fft.py",
)
# What reads the pages with their entries, which takes seconds to make.
OF_DOCS = (
    *("tests/test_array_api_table.py", "tests/test_docs.py", "tests/test_docs_examples.py"),
    *("tests/test_operations_table.py", "tests/test_reference.py"),
)
ARRAY_API_TESTS = "https://github.com/data-apis/array-api-tests"
OF_EXAMPLES = ("tests/test_examples.py", "tests/encode")
# Calls that block on a device or on a vendor library's planning: in async code they hold up the Trio loop.
# The left side is a pattern for the call as it is written; the right side must not contain a comma.
BLOCKING_CALLS = {
    "*.cuCtxSynchronize": "an event and the completion of its stream",
    "*.cuStreamSynchronize": "an event and the completion of its stream",
    "*.cuEventSynchronize": "the completion of the event's stream",
    "*.cudaDeviceSynchronize": "an event and the completion of its stream",
    "*.cudaStreamSynchronize": "an event and the completion of its stream",
    "*.cuMemcpyDtoH": "cuMemcpyDtoHAsync on a stream",
    "*.cuMemcpyHtoD": "cuMemcpyHtoDAsync on a stream",
    "*.nvrtcCompileProgram": "trio.to_thread.run_sync",
    "*.sync": "the completion of the stream or event",
    "*thread.join": "the completion that the thread reports",
}
FLAKE8_ASYNC = (
    "--enable=ASYNC",
    # 9: optional rules, off unless asked for; they want of each private helper the checkpoint that its public
    # caller has. 114 and 128 follow `task_status` by its name and lose it where it is handed on to a helper.
    # 124: a handler of an actor is `async def`, whether it awaits or not.
    "--disable=ASYNC9,ASYNC114,ASYNC124,ASYNC128",
)
# Functions of arrays: they await operations and each other, and start, cancel and catch nothing.
OF_FUNCTIONS = ("arrays", "expressions", "fft", "linalg", "nn", "random", "sparse", "tensor")
# A file without one of these has nothing that the rules are about.
ASYNC_WORDS = re.compile(r"\basync\b|\btrio\b|\bBaseException\b|\bexcept\s*:")
_DRIVER_PROBE = """
import ctypes, sys
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    sys.exit(f"no CUDA driver ({error})")
code = driver.cuInit(0)
count, version = ctypes.c_int(), ctypes.c_int()
code = code or driver.cuDeviceGetCount(ctypes.byref(count))
code = code or driver.cuDriverGetVersion(ctypes.byref(version))
if code:
    sys.exit(f"the CUDA driver answers with error {code}")
if not count.value:
    sys.exit("the CUDA driver sees no device")
if version.value < 12000:
    sys.exit("the CUDA driver is older than CUDA 12")
print(min(version.value // 1000, 13))  # the extras there are; a newer driver runs what is for the last one
"""


# The tests start a thousand interpreters, and without bytecode each would compile NumPy and SciPy anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


class _Environment:
    """Where the session `env` put the environment that the other sessions use."""

    python: str = ""


def _python(
    session: nox.Session,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    silent: bool = False,
    log: bool = True,
) -> None:
    session.run(_Environment.python, *arguments, env=env, silent=silent, log=log, external=True)


def why_not_cuda() -> str | None:
    """Say why the CUDA backend cannot be tested here, or return None if it can."""
    if not (ROOT / "trio_accel" / "backends" / "cuda").is_dir():
        return "this version has no CUDA backend"
    return _driver()[1]


def _driver() -> tuple[str, str | None]:
    # In a process of its own, so that the one that starts all the others never loads the driver.
    probe = subprocess.run([sys.executable, "-c", _DRIVER_PROBE], capture_output=True, text=True, check=False)
    if probe.returncode:
        return "", (probe.stderr.strip().splitlines() or [f"the probe ended with {probe.returncode}"])[-1]
    return probe.stdout.strip(), None


def asked_for(backend: str, argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Tell whether the user named a backend, as opposed to taking it as one of all.

    Args:
        backend: the backend's name.
        argv: the arguments of nox; those after `--` belong to pytest and do not count.
        environ: the environment; nox takes sessions from ``NOXSESSION`` too.
    """
    own = argv[: argv.index("--")] if "--" in argv else argv
    return any(backend in word for word in (*own, environ.get("NOXSESSION", "")))


@nox.session(venv_backend="uv|virtualenv", download_python="never", default=False)
def env(session: nox.Session) -> None:
    """Make the environment that all the others work in."""
    if session.virtualenv.venv_backend == "none":  # --no-venv: the one that nox runs in, as it is
        _Environment.python = sys.executable
        return
    _Environment.python = str(Path(session.bin) / "python")
    extras = "dev" if why_not_cuda() else f"dev,cuda{_driver()[0]}"
    # pip would compile on one core.
    session.install("--no-compile", "-e", f".[{extras}]")
    folder = str(Path(session.bin).parent / "lib")
    # Some packages carry files for other versions of Python, which do not compile.
    session.run(_Environment.python, "-m", "compileall", "-qq", "-j", "0", folder, success_codes=[0, 1])


@nox.session(venv_backend="none", requires=["env"])
@nox.parametrize("backend", ["cpu", "cuda"])
def tests(session: nox.Session, backend: str) -> None:
    """Run the tests on one backend, a sample of each family; what follows `--` goes to pytest."""
    _test(session, backend, *SAMPLE)


@nox.session(venv_backend="none", requires=["env"], default=False)
@nox.parametrize("backend", ["cpu", "cuda"])
def tests_full(session: nox.Session, backend: str) -> None:
    """Run all tests on one backend; with `cpu` all of `stand_in`, `third` and the command line on machines.

    Where the environment names a checkout of array-api-tests, in ``ARRAY_API_TESTS``, that suite too.
    """
    _test(session, backend)
    if backend == "cpu":
        for machine in MACHINES:
            _test_on_machine(session, machine, *TWO_AT_A_TIME, *OF_THE_MACHINE, "tests/cli")
        if "ARRAY_API_TESTS" in os.environ:
            _array_api(session, os.environ["ARRAY_API_TESTS"])
        _test_on_stand_in(session)
        _test_third(session, *CONFORMANCE, *MORE_CONFORMANCE)


def _test(session: nox.Session, backend: str, *sample: str) -> None:
    reason = why_not_cuda() if backend == "cuda" else None
    if reason is not None:
        message = f"cannot test the cuda backend: {reason}"
        if asked_for("cuda", sys.argv[1:], os.environ):
            session.error(message)
        session.skip(message)
    pytest, env = ("-m", "pytest", "-m"), {"TRIO_ACCEL_BACKEND": backend}
    # Those for the hardware take most of an hour: they have a session of their own.
    if session.posargs or backend == "cuda":  # who debugs wants one process, and so does a device
        _python(session, *pytest, "not gpu", *session.posargs, env=env)
        return
    # What `docs` and `examples` run too is run once by the default sessions.
    ignored = [f"--ignore={path}" for path in (*OF_DOCS, *OF_EXAMPLES)] if sample else []
    quick = " and not slow" if sample else ""
    load = SHORT_LOAD if sample else {}
    marks = f"not gpu and not alone{quick}"
    _python(session, *pytest, marks, *sample, *ignored, *TWO_AT_A_TIME, env={**env, **load})
    _Ahead.settle()  # they measure times
    # Only from their files: to collect all takes longer than they do.
    alone = [
        str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if ALONE in file.read_text("utf-8")
    ]
    _python(session, *pytest, "not gpu and alone", *sample, *alone, env=env)


@nox.session(venv_backend="none", requires=["env"])
@nox.parametrize("machine", MACHINES)
def machines(session: nox.Session, machine: str) -> None:
    """Run tests that could see the machine on another one, faked; what follows `--` goes to pytest."""
    _test_on_machine(session, machine, *(session.posargs or (*SAMPLE, *TWO_AT_A_TIME, *OF_THE_MACHINE)))


def _test_on_machine(session: nox.Session, machine: str, *arguments: str) -> None:
    env = {"TRIO_ACCEL_BACKEND": "cpu", "TRIO_ACCEL_TEST_MACHINE": machine}
    quick = " and not slow" if "--sample" in arguments else ""
    _python(session, "-m", "pytest", "-m", f"not gpu and not alone{quick}", *arguments, env=env)


@nox.session(venv_backend="none", requires=["env"])
def stand_in(session: nox.Session) -> None:
    """Run a sample of the tests of the CUDA backend without a GPU: on a driver that is compiled."""
    _test_on_stand_in(session, *SAMPLE)


@nox.session(venv_backend="none", requires=["env"])
def third(session: nox.Session) -> None:
    """Run the conformance tests on a third backend, `tests/third_backend.py`; it has no workers.

    Those of linear algebra, transforms, expressions and memory, sampled; or what is named behind `--`.
    """
    _test_third(session, *(session.posargs or [*SAMPLE, *CONFORMANCE]))


def _test_third(session: nox.Session, *chosen: str) -> None:
    ignored = [
        f"--ignore={path}"
        for path in ("tests/backends/cpu", "tests/backends/cuda", "tests/jit/test_faults.py")
    ]
    command = ("-m", "pytest", *TWO_AT_A_TIME, *ignored, *chosen)
    _python(session, *command, env={"TRIO_ACCEL_BACKEND": "third"})


def _test_on_stand_in(session: nox.Session, *sample: str) -> None:
    if not all(map(shutil.which, ("gcc", "g++"))):
        session.skip("the stand-in for the driver is compiled with gcc and g++, which are not here")
    command = (
        "-m",
        "trio_accel.testing.stand_in",
        "-m",
        "pytest",
        "-m",
        "not gpu and not slow and not alone",
    )
    left_out = OF_ANY_BACKEND if sample else ()
    ignored = [f"--ignore-glob={path}" for path in (*NO_DEVICE, *left_out)]
    tests = [path for path in (f"tests/{folder}" for folder in STAND_IN) if path not in left_out]
    tests.append("tests/benchmarks/test_bandwidth_rows.py")
    chosen = session.posargs or [*sample, *THREE_AT_A_TIME, *tests]
    _python(session, *command, *ignored, *chosen, env={"TRIO_ACCEL_BACKEND": "cuda"})


@nox.session(venv_backend="none", requires=["env"])
def lint(session: nox.Session) -> None:
    """Check style and async rules, and that the changelog fragments are well formed."""
    _python(session, "-m", "ruff", "check")
    _python(session, "-m", "ruff", "format", "--check")
    package = ROOT / "trio_accel"
    folders = (path for path in sorted(package.iterdir()) if path.is_dir() and path.name not in OF_FUNCTIONS)
    _lint_async(session, *(f"trio_accel/{path.name}" for path in folders), "examples", "benchmarks")
    _python(session, "-m", "towncrier", "build", "--draft", "--version=next", silent=True)


@nox.session(venv_backend="none", requires=["env"], default=False)
def lint_tests(session: nox.Session) -> None:
    """Check what `lint` leaves to ruff's async rules by the others, too: takes minutes, and finds little."""
    _lint_async(session, "tests", *(f"trio_accel/{folder}" for folder in OF_FUNCTIONS))


def _lint_async(session: nox.Session, *folders: str) -> None:
    calls = ",".join(f"{call}->{instead}" for call, instead in BLOCKING_CALLS.items())
    files = [
        str(path)
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if ASYNC_WORDS.search(path.read_text(encoding="utf-8"))
    ]
    arguments = (".ci/async_rules.py", *FLAKE8_ASYNC, f"--async200-blocking-calls={calls}")
    session.log(f"python {' '.join(arguments)} ({len(files)} files)")
    _in_parts(session, files, *arguments)


def _in_parts(session: nox.Session, files: Sequence[str], *arguments: str) -> None:
    """Run a program that takes files and no folders, and one core, on as many parts as there are cores."""
    parts = min(os.cpu_count() or 1, len(files))
    # By turns in order of size, so that all are at it equally long.
    by_size = sorted(files, key=lambda file: Path(file).stat().st_size)
    _wait(session, *(_start(*arguments, *by_size[part::parts]) for part in range(parts)))


def _start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen((_Environment.python, *arguments))


def _wait(session: nox.Session, *running: subprocess.Popen[bytes]) -> None:
    codes = [process.wait() for process in running]
    if any(codes):
        session.error(f"exit codes {codes}")


class _Ahead:
    """What takes one core for minutes, and runs beside what mostly waits.

    It has the lowest priority, so that no test waits for it. What it says is kept until that is asked for.
    """

    running: ClassVar[dict[str, list[tuple[subprocess.Popen[bytes], IO[bytes]]]]] = {}

    @classmethod
    def begin(cls, name: str) -> None:
        """Start the commands of a session, unless they run."""
        if name in cls.running:
            return
        commands: dict[str, list[tuple[str, ...]]] = {
            "types": [("-m", "mypy"), ("-m", "pyright", "--pythonpath", _Environment.python)],
            "docs": [("-m", "sphinx", "-qW", "--keep-going", "-b", "html", "docs", "docs/_build/html")],
        }
        lowly = ("nice", "-n", "19") if shutil.which("nice") else ()
        cls.running[name] = []
        for command in commands[name]:
            output = tempfile.TemporaryFile()  # noqa: SIM115  # until the process has ended
            process = subprocess.Popen(
                (*lowly, _Environment.python, *command),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, which `stop` ends: pyright starts Node
            )
            cls.running[name].append((process, output))

    @classmethod
    def settle(cls) -> None:
        """Wait for all."""
        for process, _ in itertools.chain.from_iterable(cls.running.values()):
            process.wait()

    @classmethod
    def end(cls, session: nox.Session, name: str) -> None:
        """Wait for the commands of a session, print what they said, and fail if one of them did."""
        cls.begin(name)
        codes: list[int] = []
        for process, output in cls.running.pop(name):
            codes.append(process.wait())
            output.seek(0)
            print(output.read().decode(errors="replace"), flush=True)  # noqa: T201
        if any(codes):
            session.error(f"exit codes {codes}")

    @classmethod
    def stop(cls) -> None:
        """End what nobody waits for any more."""
        for process, _ in itertools.chain.from_iterable(cls.running.values()):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


atexit.register(_Ahead.stop)


@nox.session(venv_backend="none", requires=["env"])
def ahead(session: nox.Session) -> None:
    """Start the checkers of types and Sphinx beside the tests; `types` and `docs` wait for them."""
    session.log("mypy, pyright and Sphinx run beside the tests")
    for name in ("types", "docs"):
        _Ahead.begin(name)


@nox.session(venv_backend="none", requires=["env"])
def types(session: nox.Session) -> None:
    """Check types with mypy and pyright, both strict."""
    _Ahead.end(session, "types")


@nox.session(venv_backend="none", requires=["env"], default=False)
def types_public(session: nox.Session) -> None:
    """Check that every public name is typed, as pyright sees it in the installed package."""
    # It looks for py.typed on the path only, and not where an editable installation points to.
    path = {"PYTHONPATH": str(ROOT)}
    pyright = ("-m", "pyright", "--pythonpath", _Environment.python)
    _python(session, *pyright, "--verifytypes", "trio_accel", "--ignoreexternal", env=path)


@nox.session(venv_backend="none", requires=["env"])
def docs(session: nox.Session) -> None:
    """Build the documentation with warnings as errors, and run every example in it and in the docstrings."""
    _Ahead.begin("docs")
    try:
        _python(session, "-m", "pytest", "--doctest-modules", "trio_accel")
        _python(session, "-m", "pytest", *THREE_AT_A_TIME, *OF_DOCS)
    finally:
        _Ahead.end(session, "docs")
    session.log(f"the pages begin at {ROOT / 'docs' / '_build' / 'html' / 'index.html'}")


@nox.session(venv_backend="none", requires=["env"])
def examples(session: nox.Session) -> None:
    """Run every example program as its reader would."""
    _python(session, "-m", "pytest", *(session.posargs or THREE_AT_A_TIME), *OF_EXAMPLES)


@nox.session(venv_backend="none", requires=["env"], default=False)
def array_api(session: nox.Session) -> None:
    """Run the suite of the array API standard, of `-- CHECKOUT` or from GitHub, and record its counts."""
    checkout, *arguments = session.posargs or [_array_api_checkout(session)]
    if not checkout:
        session.error(f"{ARRAY_API_TESTS} does not answer; name a checkout of it behind --")
    _array_api(session, checkout, "--record", str(ROOT / "docs" / "array_api.json"), *arguments)


@nox.session(venv_backend="none", requires=["env"])
def array_api_sample(session: nox.Session) -> None:
    """Run that suite with two examples of each property, where ``ARRAY_API_TESTS`` or GitHub has it."""
    checkout = os.environ.get("ARRAY_API_TESTS") or _array_api_checkout(session)
    if not checkout:
        session.skip("array-api-tests is on GitHub alone, which does not answer here")
    _array_api(session, checkout, "--examples", "2", "-n", "2", "-q")


def _array_api_checkout(session: nox.Session) -> str:
    """Clone the suite, once; return an empty text where GitHub does not answer."""
    checkout = Path(session.create_tmp()) / "array-api-tests"
    if not (checkout / "array-api" / "src").is_dir():
        shutil.rmtree(checkout, ignore_errors=True)
        clone = ("git", "clone", "-q", "--depth=1", "--recurse-submodules", "--shallow-submodules")
        try:
            subprocess.run(
                (*clone, ARRAY_API_TESTS, str(checkout)), check=True, capture_output=True, timeout=120
            )
        except (subprocess.SubprocessError, OSError):
            return ""
    return str(checkout)


def _array_api(session: nox.Session, checkout: str, *arguments: str) -> None:
    _python(session, "-m", "pip", "install", "--quiet", "ndindex", "pytest-json-report")
    _python(session, str(ROOT / "tests" / "interop" / "array_api_suite.py"), checkout, *arguments)


@nox.session(venv_backend="none", requires=["env"], default=False)
def benchmarks(session: nox.Session) -> None:
    """Print the benchmark table; what follows `--` goes to `python -m benchmarks`. A missed goal fails it."""
    _python(session, "-m", "benchmarks", *session.posargs)


@nox.session(venv_backend="none", requires=["env"], default=False)
def soak(session: nox.Session) -> None:
    """Ask for everything for 15 minutes, with a kill each second; `-- 60` for so many seconds."""
    _python(session, "-m", "benchmarks.soak", *session.posargs)


@nox.session(venv_backend="none", requires=["env"], default=False)
def gpu(session: nox.Session) -> None:
    """Run what needs the hardware: tests, faults, benchmarks, a soak; `-- --only rounds,leaks` a part."""
    reason = why_not_cuda()
    if reason is not None:
        session.error(f"cannot test on the hardware: {reason}")
    out = ("--out", str(Path(session.create_tmp()) / "results"))
    _python(session, "-m", "benchmarks.gpu", *out, *session.posargs)


@nox.session(venv_backend="none", requires=["env"], default=False)
def coverage(session: nox.Session) -> None:
    """Report the branch coverage of the test suite."""
    _python(session, "-m", "coverage", "erase")
    _python(
        session, "-m", "coverage", "run", "-m", "pytest", *session.posargs, env={"TRIO_ACCEL_BACKEND": "cpu"}
    )
    _python(session, "-m", "coverage", "combine", "--quiet")
    _python(session, "-m", "coverage", "report")
