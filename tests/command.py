"""How tests run a command line: in this process, or in one of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import pytest

__all__ = ["Cli", "Done", "Refused", "Start", "make_cli", "make_refused", "make_start"]


@attrs.frozen
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


Cli = Callable[..., Done]
Refused = Callable[..., str]
Start = Callable[..., "subprocess.Popen[str]"]


def make_cli(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


def make_refused(cli: Cli, name: str) -> Refused:
    """Run a command that must end with code 2 and one line on stderr; return the line."""

    def run(*arguments: object) -> str:
        done = cli(*arguments)
        assert done.code == 2, done
        assert done.out == ""
        assert done.err.startswith(f"{name}: ")
        assert done.err.count("\n") == 1
        return done.err.removeprefix(f"{name}: ").rstrip("\n")

    return run


def make_start(program: tuple[str, ...], environment: Mapping[str, str], folder: Path) -> Start:
    """Start a command in a process of its own, with warnings as errors."""

    def run(*arguments: str, **options: object) -> subprocess.Popen[str]:
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
            [sys.executable, *program, *arguments],
            **{
                "cwd": folder,
                "env": environment,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                **options,
            },
        )

    return run
