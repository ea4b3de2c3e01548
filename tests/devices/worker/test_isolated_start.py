"""Workers import the modules of the program, and no module that merely is in the working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from isolated import options, replace_worker
from processes import LAUNCHER, command

import trio_accel as ta
from trio_accel.backends.base.kit.modules import search_path
from trio_accel.backends.cpu import CpuBackend
from trio_accel.devices.launcher._launcher import open_launcher
from trio_accel.devices.launcher._link import interpreter_options

pytestmark = [pytest.mark.any_backend, pytest.mark.own_launcher]

# Modules that an interpreter or a worker imports early, and modules it looks for and usually does not find.
HOSTILE = [
    "codecs",
    "collections",
    "copyreg",
    "ctypes",
    "encodings",
    "enum",
    "functools",
    "io",
    "json",
    "keyword",
    "logging",
    "numpy",
    "operator",
    "os",
    "re",
    "reprlib",
    "site",
    "sitecustomize",
    "socket",
    "struct",
    "threading",
    "trio",
    "types",
    "typing",
    "usercustomize",
    "warnings",
]
WAYS = pytest.mark.parametrize("preload", [(), CpuBackend().preload], ids=["fresh", "fork"])


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path, None, None]:
    """A working directory full of modules that fail and leave a trace, which none is to do."""
    trace = tmp_path / "trace"
    for name in HOSTILE:
        (tmp_path / f"{name}.py").write_text(
            f"import os\nos.close(os.open({str(trace)!r}, os.O_CREAT | os.O_WRONLY))\nraise SystemError\n"
        )
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not trace.exists()


async def serve(system: ta.System, preload: tuple[str, ...]) -> None:
    """Have a device opened, and continued with another worker."""
    async with system.open_device("cpu", options=options()) as device:
        x = await device.put(np.arange(4.0))
        await replace_worker(device)
        assert await (await ta.linalg.nrm2(x)).item() == pytest.approx(14.0**0.5)
        process: Any = device.dispatch.process  # type: ignore[attr-defined]
        # Forks have the launcher's command line.
        assert (LAUNCHER in command(process.pid)) is bool(preload)


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("entries", [[], [""]], ids=["none", "empty"])
async def test_modules_of_the_working_directory_are_not_imported(
    system: ta.System,
    hostile: Path,
    monkeypatch: pytest.MonkeyPatch,
    preload: tuple[str, ...],
    entries: list[Any],
) -> None:
    monkeypatch.setattr(CpuBackend, "preload", preload)
    monkeypatch.setattr(sys, "path", [*entries, *sys.path])
    await serve(system, preload)


@WAYS
async def test_variables_do_not_give_the_places_of_modules(
    system: ta.System, hostile: Path, monkeypatch: pytest.MonkeyPatch, preload: tuple[str, ...]
) -> None:
    monkeypatch.setattr(CpuBackend, "preload", preload)
    monkeypatch.setenv("PYTHONPATH", f":{hostile}:.")
    monkeypatch.setenv("PYTHONSTARTUP", str(hostile / "json.py"))
    monkeypatch.setenv("PYTHONUSERBASE", str(hostile))
    monkeypatch.setenv("PYTHONHOME", str(hostile))
    await serve(system, preload)


def test_a_safely_started_program_stays_safe(hostile: Path) -> None:
    program = (
        "import trio, trio_accel as ta\n"
        "async def main():\n"
        "    options = ta.DeviceOptions(isolation='process')\n"
        "    async with ta.open_system('s') as s, s.open_device('cpu', options=options) as device:\n"
        "        print(await (await device.put([1.0])).to_host())\n"
        "trio.run(main)\n"
    )
    path = "".join(f"sys.path.append({entry!r})\n" for entry in sys.path if entry)
    said = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys\n{path}{program}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (said.stdout, said.stderr) == ("[1.]\n", "")


def test_paths_relative_to_the_working_directory_are_searched_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "/a", "b", Path("/c"), b"/d", 5, None, "/e", "."])
    assert search_path() == ["/a", "/c", "/d", "/e", "", "b", "."]


@WAYS
async def test_a_path_among_the_entries_is_searched(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, preload: tuple[str, ...]
) -> None:
    (tmp_path / "of_a_path.py").write_text("from trio_accel.linalg import BlasActor\n")
    monkeypatch.setattr(CpuBackend, "preload", preload)
    async with system.open_device("cpu", options=options()) as device:
        x = await device.put(np.ones(4))
        monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, 7])
        await replace_worker(device)
        assert (await x.to_host()).tolist() == [1.0] * 4
        changes = options(libraries=("of_a_path:BlasActor",))
    async with system.open_device("cpu", options=changes) as device:
        assert (await (await device.put(np.ones(2))).to_host()).tolist() == [1.0, 1.0]


LONG = {f"LONG_{number}": "x" * 100_000 for number in range(5)}
TOO_LONG = {"LONGER": "x" * 140_000}
FAR_TOO_LONG = {f"LONG_{number}": "x" * 130_000 for number in range(60)}


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (LONG, "100000"),
        (TOO_LONG, {"fresh": "0", "fork": "140000"}),
        (FAR_TOO_LONG, {"fresh": "0", "fork": "130000"}),
    ],
    ids=["long", "too long", "far too long"],
)
async def test_an_environment_of_any_length_starts_a_worker(
    system: ta.System,
    monkeypatch: pytest.MonkeyPatch,
    preload: tuple[str, ...],
    changes: dict[str, str],
    expected: Any,
) -> None:
    """A fresh interpreter gets what the kernel takes."""
    launcher = await open_launcher(system)
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    code = f"import os; os.write(3, b'%d' % len(os.environ.get({next(iter(changes))!r}, '')))"
    reader, writer = os.pipe()
    worker = await launcher.start_worker(("-c", code), [writer], preload)
    os.close(writer)
    assert await worker.wait() == "exited with code 0"
    said = os.read(reader, 99).decode()
    os.close(reader)
    assert said == (expected if isinstance(expected, str) else expected["fork" if preload else "fresh"])


@pytest.mark.slow
async def test_a_grown_environment_costs_no_device(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with system.open_device("cpu", options=options()) as device:
        x = await device.put(np.ones(4))
        for name, value in FAR_TOO_LONG.items():
            monkeypatch.setenv(name, value)
        await replace_worker(device)
        assert (await x.to_host()).tolist() == [1.0] * 4


@pytest.mark.parametrize("executable", [None, ""])
async def test_an_unknown_interpreter_is_reported(
    system: ta.System, monkeypatch: pytest.MonkeyPatch, executable: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", executable)
        with pytest.raises(ta.NotSupportedError, match=r"sys\.executable is .*isolation='inline'"):
            await system.open_device("cpu", options=options())
    launcher = await open_launcher(system)
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(ta.AccelError, match=r"sys\.executable is"):
        await launcher.start_worker(("-c", ""))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PYTHONDEVMODE", "1", ["-X", "dev"]),
        ("PYTHONOPTIMIZE", "1", ["-O"]),
        ("PYTHONOPTIMIZE", "2", ["-OO"]),
        ("PYTHONOPTIMIZE", "yes", ["-O"]),
        ("PYTHONTRACEMALLOC", "5", ["-X", "tracemalloc=5"]),
        ("PYTHONTRACEMALLOC", "a", []),
        ("PYTHONUTF8", "0", ["-X", "utf8=0"]),
        ("PYTHONUTF8", "7", []),
        ("PYTHONWARNINGS", "error,ignore", ["-W", "error", "-W", "ignore"]),
    ],
)
def test_variables_with_other_values_are_in_force(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: list[str]
) -> None:
    def told() -> list[str]:
        return [*interpreter_options()]

    for each in ("DEVMODE", "OPTIMIZE", "TRACEMALLOC", "UTF8", "WARNINGS"):
        monkeypatch.delenv(f"PYTHON{each}", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert told() == ["-I"]
    monkeypatch.setenv(name, value)
    assert told() == ["-I", *expected]
    monkeypatch.setattr(sys, "flags", SimpleNamespace(ignore_environment=1))
    assert told() == ["-I"]
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert told() == ["-I", "-B"]
