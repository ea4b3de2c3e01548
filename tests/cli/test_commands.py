"""Help, versions, usage errors and exit codes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest

import trio_accel as ta
from trio_accel.backends.cpu import CpuBackend

if TYPE_CHECKING:
    from command import Cli

Refused = Callable[..., str]
Start = Callable[..., "subprocess.Popen[str]"]
IS_ISOLATED = "process" in ta.list_devices()[0].isolations
DEMO = pytest.mark.skipif(not IS_ISOLATED, reason="the device has no worker processes")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_the_commands(cli: Cli, arguments: list[str]) -> None:
    done = cli(*arguments)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Usage: trio-accel COMMAND")
    for name in ("demo", "info", "top", "trace", "--help", "--version"):
        assert re.search(rf"^│ {name} ", done.out, re.MULTILINE)


def test_help_of_the_demo_names_its_command(cli: Cli) -> None:
    done = cli("demo", "--help")
    assert done.code == 0
    assert re.findall(r"^│ (\w+) ", done.out, re.MULTILINE) == ["recover"]
    assert "Exit codes: 0 every check holds" in done.out


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("info", ["--json"]),
        ("top", ["--once"]),
        ("demo", ["--rounds", "--backend", "--json"]),
        ("demo recover", ["--rounds", "--backend", "--json"]),
    ],
)
def test_every_option_is_described(cli: Cli, command: str, options: list[str]) -> None:
    done = cli(*command.split(), "--help")
    assert done.code == 0
    parameters = done.out.partition("─ Parameters ─")[2]
    described = re.findall(r"^│ (--[a-z-]+)(?: [A-Z.]+)? {2,}\S", parameters, re.MULTILINE)
    assert described == options
    assert max(map(len, done.out.splitlines())) <= 80


def test_version(cli: Cli) -> None:
    done = cli("--version")
    assert (done.code, done.out) == (0, f"{ta.__version__}\n")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("bogus", 'Unknown command "bogus". Available commands: demo, info, trace, top, replay, journal.'),
        ("demo bogus", "too many arguments: bogus"),
        ("demo --nothing", "Unknown option"),
        ("demo --backend", "requires an argument"),
    ],
)
def test_wrong_arguments_end_with_one_line(refused: Refused, command: str, reason: str) -> None:
    assert reason in refused(*command.split())


@pytest.mark.parametrize("step", ["", "recover"])
@pytest.mark.parametrize("backend", ["bogus", "cpu:99", "", "cpu:x"])
def test_a_missing_backend(refused: Refused, step: str, backend: str) -> None:
    line = refused("demo", *step.split(), "--backend", backend)
    assert line.startswith(f"cannot open a device: '{backend}'")
    assert "cpu" in line.partition(": ")[2].partition(":")[2]


@pytest.mark.parametrize("step", ["demo", "demo recover"])
def test_a_device_without_worker_processes(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    infos = CpuBackend().list_devices()
    only_inline = tuple(attrs.evolve(info, isolations=("inline",)) for info in infos)
    monkeypatch.setattr(CpuBackend, "list_devices", lambda self: only_inline)
    line = refused(*step.split(), "--backend", "cpu")
    assert line.startswith("cannot open a device: isolation='process' is not there for this device")


def test_a_wrong_backend_in_the_environment(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIO_ACCEL_BACKEND", "bogus")
    assert "'bogus' (from the environment variable TRIO_ACCEL_BACKEND)" in refused("demo", "recover")


def test_the_program_ends_with_the_commands_code(start: Start) -> None:
    process = start("trace", "/no/such/file.py")
    out, err = process.communicate(timeout=40)
    assert (process.returncode, out) == (2, "")
    assert err == "trio-accel: program /no/such/file.py does not exist\n"


def test_names_that_the_terminal_cannot_show(start: Start, environment: dict[str, str]) -> None:
    process = start("trace", "/größe.py", env={**environment, "PYTHONIOENCODING": "ascii"})
    assert process.communicate(timeout=40)[1] == "trio-accel: program /gr??e.py does not exist\n"


@pytest.mark.slow
@DEMO
def test_signs_that_the_terminal_cannot_show(start: Start, environment: dict[str, str]) -> None:
    environment = {**environment, "PYTHONIOENCODING": "ascii"}
    process = start("demo", "recover", env=environment)
    out = process.communicate(timeout=40)[0]
    assert re.search(r"\n\+ recover  \d faults, ", out)
    assert out.count("\n  + ") == 6
    assert "`- context (WorkerContextActor)" in out
    assert "?" not in out


def test_nothing_in_a_name_controls_the_terminal(refused: Refused) -> None:
    assert refused("trace", "a\x1b[31m\n\x9bb.py") == "program a?[31m ?b.py does not exist"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        *("--help", "info", "info --json"),
        *(pytest.param(command, marks=DEMO) for command in ("demo recover", "demo recover --json")),
    ],
)
def test_output_that_nobody_reads(start: Start, command: str) -> None:
    process = start(*command.split())
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert (process.communicate(timeout=40)[1], process.returncode) == ("", 141)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device file is Linux's")
@pytest.mark.parametrize("command", ["info", pytest.param("demo recover --json", marks=DEMO)])
def test_output_that_cannot_be_written(start: Start, command: str) -> None:
    with Path("/dev/full").open("w", encoding="ascii") as full:
        process = start(*command.split(), stdout=full)
        err = process.communicate(timeout=40)[1]
    assert err == "trio-accel: cannot write the output: no space left on device\n"
    assert process.returncode == 1
