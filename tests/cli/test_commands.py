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


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_the_commands(cli: Cli, arguments: list[str]) -> None:
    done = cli(*arguments)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Usage: trio-accel COMMAND")
    for name in ("demo", "info", "top", "--help", "--version"):
        assert re.search(rf"^│ {name} ", done.out, re.MULTILINE)


def test_help_of_the_demo_names_its_steps_in_order(cli: Cli) -> None:
    done = cli("demo", "--help")
    assert done.code == 0
    assert re.findall(r"^│ (\w+) ", done.out, re.MULTILINE) == [
        "matmul",
        "spectrum",
        "solve",
        "recover",
    ]
    assert "Exit codes: 0 every check holds" in done.out


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("info", ["--json"]),
        ("top", ["--interval", "--sort", "--filter", "--once", "--json"]),
        ("demo", ["--backend", "--isolation", "--json"]),
        ("demo matmul", ["--sizes", "--clients", "--dtype", "--backend", "--isolation", "--json"]),
        ("demo spectrum", ["--output", "--backend", "--isolation", "--json"]),
        ("demo solve", ["--rtol", "--max-iterations", "--backend", "--isolation", "--json"]),
        ("demo recover", ["--rounds", "--backend", "--isolation", "--json"]),
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
        ("bogus", 'Unknown command "bogus". Available commands: demo, info, trace, top.'),
        ("demo bogus", "there is no demo 'bogus'; there are matmul, spectrum, solve, recover"),
        ("demo matmul extra", "too many arguments: extra"),
        ("demo --nothing", "Unknown option"),
        ("demo --backend", "requires an argument"),
        (
            "demo matmul --sizes 1,x",
            "must be whole numbers from 1 to 16384 with commas between them, got '1,x'",
        ),
        ("demo matmul --sizes 0", "must be whole numbers from 1 to 16384"),
        ("demo matmul --sizes 16385", "must be whole numbers from 1 to 16384"),
        ("demo matmul --sizes -5", "--sizes"),
        ("demo matmul --sizes ,", "must be whole numbers from 1 to 16384"),
        ("demo matmul --sizes 99999999999999999999", "must be whole numbers from 1 to 16384"),
        ("demo matmul --clients 0", "Must be >= 1"),
        ("demo matmul --clients 65", "Must be <= 64"),
        ("demo matmul --clients many", "--clients"),
        ("demo matmul --dtype int8", "float64"),
        ("demo solve --rtol 0", "--rtol must be between 0 and 1, got 0"),
        ("demo solve --rtol 1", "--rtol must be between 0 and 1, got 1"),
        ("demo solve --rtol nan", "--rtol must be between 0 and 1, got nan"),
        ("demo solve --rtol 1e-400", "--rtol must be between 0 and 1, got 0"),
        ("demo solve --max-iterations 0", "Must be >= 1"),
    ],
)
def test_wrong_arguments_end_with_one_line(refused: Refused, command: str, reason: str) -> None:
    assert reason in refused(*command.split())


@pytest.mark.parametrize("step", ["", "matmul", "spectrum", "solve", "recover"])
@pytest.mark.parametrize("backend", ["bogus", "cpu:99", "", "cpu:x"])
def test_a_backend_that_is_not_there(refused: Refused, step: str, backend: str) -> None:
    line = refused("demo", *step.split(), "--backend", backend)
    assert line.startswith(f"cannot open a device: '{backend}'")
    assert "cpu" in line.partition(": ")[2].partition(":")[2]


@pytest.mark.parametrize("step", ["demo", "demo matmul", "demo spectrum", "demo solve", "demo recover"])
def test_an_isolation_that_is_not_there(refused: Refused, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    infos = CpuBackend().list_devices()
    only_inline = tuple(attrs.evolve(info, isolations=("inline",)) for info in infos)
    monkeypatch.setattr(CpuBackend, "list_devices", lambda self: only_inline)
    line = refused(*step.split(), "--isolation", "process", "--backend", "cpu")
    assert line == (
        "cannot open a device: isolation='process' is not there for this device; it has 'inline'; "
        "open the device with isolation='inline' (device cpu:0)"
    )
    assert refused(*step.split(), "--isolation", "thread").endswith('Choose from: "inline", "process".')


def test_a_wrong_backend_in_the_environment(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIO_ACCEL_BACKEND", "bogus")
    assert "'bogus' (from the environment variable TRIO_ACCEL_BACKEND)" in refused("demo", "recover")


def test_no_device_is_opened_for_a_wrong_input(refused: Refused) -> None:
    line = refused("demo", "spectrum", "--output", "no/x.png", "--backend", "bogus")
    assert line == "cannot write no/x.png: there is no directory no"


def test_the_program_ends_with_the_commands_code(start: Start) -> None:
    process = start("demo", "spectrum", "--output", "no/x.png")
    out, err = process.communicate(timeout=40)
    assert (process.returncode, out) == (2, "")
    assert err == "trio-accel: cannot write no/x.png: there is no directory no\n"


def test_names_that_the_terminal_cannot_show(start: Start, environment: dict[str, str]) -> None:
    command = "demo", "spectrum", "--output", "größe/x.png"
    err = start(*command, env={**environment, "PYTHONIOENCODING": "ascii"}).communicate(timeout=40)[1]
    assert err == "trio-accel: cannot write gr??e/x.png: there is no directory gr??e\n"


@pytest.mark.slow
def test_signs_that_the_terminal_cannot_show(start: Start, environment: dict[str, str]) -> None:
    environment = {**environment, "PYTHONIOENCODING": "ascii"}
    process = start("demo", "recover", "--isolation", "inline", env=environment)
    out = process.communicate(timeout=40)[0]
    assert "\n+ recover  2 faults, " in out
    assert out.count("\n  + ") == 6
    assert "`- context (ContextActor)" in out
    assert "1 > 2" in out
    assert "float32 2048x2048" in out
    assert "?" not in out


def test_nothing_in_a_name_controls_the_terminal(refused: Refused) -> None:
    line = refused("demo", "spectrum", "--output", "a\x1b[31m\n\x9bb/x.png")
    assert line == "cannot write a?[31m ?b/x.png: there is no directory a?[31m ?b"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["--help", "info", "info --json", "demo recover", "demo recover --json"])
def test_output_that_nobody_reads(start: Start, command: str) -> None:
    process = start(*command.split())
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert (process.communicate(timeout=40)[1], process.returncode) == ("", 141)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device file is Linux's")
@pytest.mark.parametrize("command", ["info", "demo recover --json"])
def test_output_that_cannot_be_written(start: Start, command: str) -> None:
    with Path("/dev/full").open("w", encoding="ascii") as full:
        process = start(*command.split(), stdout=full)
        err = process.communicate(timeout=40)[1]
    assert err == "trio-accel: cannot write the output: no space left on device\n"
    assert process.returncode == 1
