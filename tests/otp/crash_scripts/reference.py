"""Running scripts on the supervisor of OTP: one Erlang VM that takes scripts for as long as it is open."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from .language import Act, Add, Child, Crash, Finish, Remove, Script, Step, Together, Wait, Worker
from .log import RawEvent

__all__ = ["OtpReference", "why_no_otp"]

_SOURCE = Path(__file__).with_name("crash_scripts.erl")
# The module is compiled in memory: nothing is written anywhere.
_MAIN = """
{ok, crash_scripts, Code} = compile:file(os:getenv("CRASH_SCRIPTS"), [binary, report]),
{module, crash_scripts} = code:load_binary(crash_scripts, "crash_scripts", Code),
crash_scripts:main(),
halt().
"""


def why_no_otp() -> str | None:
    """Return the reason for having no OTP to compare with; None if there is one."""
    if shutil.which("erl") is None:
        return "there is no Erlang/OTP: `erl` is not on the path (Debian package erlang-base)"
    return None


class OtpReference:
    """An Erlang VM that runs scripts. A context manager: the VM ends with the block."""

    def __init__(self) -> None:
        # `-start_epmd` and `+S`: no daemon is left behind, and two schedulers race as well as many.
        command = (
            "erl",
            "-noshell",
            "-boot",
            "start_clean",
            "-start_epmd",
            "false",
            "+S",
            "2",
            "-eval",
            _MAIN,
        )
        environment = {**os.environ, "CRASH_SCRIPTS": str(_SOURCE), "ERL_CRASH_DUMP_BYTES": "0"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The end of its input ends it.
        with self._process:
            pass

    def run(self, *scripts: Script) -> list[list[RawEvent]]:
        """Run scripts, at the same time; returns their logs.

        Raises:
            RuntimeError: The VM could not run one of them, or has ended.
        """
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the Erlang VM has no pipes")
        self._process.stdin.write(f"[{','.join(map(_script, scripts))}].\n")
        self._process.stdin.flush()
        return [self._read_log(self._process.stdout) for _ in scripts]

    def _read_log(self, lines: IO[str]) -> list[RawEvent]:
        events: list[RawEvent] = []
        for line in lines:
            words = line.rstrip("\n").split(" ", 2)
            if words == ["done"]:
                return events
            if words[0] == "error" or len(words) != 3:
                raise RuntimeError(f"the Erlang VM: {line}")
            events.append((words[0].strip("'"), int(words[1]), words[2]))
        raise RuntimeError("the Erlang VM has ended")


def _script(script: Script) -> str:
    parents = script.parents()
    steps = _list(_step(step, parents) for step in script.steps)
    return f"{{{_child(script.root)},{steps},{str(script.forgets).lower()}}}"


def _step(step: Step, parents: Mapping[str, str]) -> str:
    match step:
        case Together(acts):
            (parent,) = {parents[act.target] for act in acts}
            return f"{{together,{_atom(parent)},{_list(map(_act, acts))}}}"
        case Add(supervisor, child):
            return f"{{add,{_atom(supervisor)},{_child(child)}}}"
        case Remove(target):
            return f"{{remove,{_atom(parents[target])},{_atom(target)}}}"
        case Wait(seconds):
            return f"{{wait,{round(seconds * 1000)}}}"
        case Crash() | Finish():
            return _act(step)


def _act(act: Act) -> str:
    return f"{{{'crash' if isinstance(act, Crash) else 'finish'},{_atom(act.target)}}}"


def _child(child: Child) -> str:
    if isinstance(child, Worker):
        hooks = _list(f"{{{hook.point},{hook.number},{_act(hook.act)}}}" for hook in child.hooks)
        return f"{{worker,{_atom(child.name)},{child.restart},{_list(map(str, child.fails))},{hooks}}}"
    options = f"{child.restart},{child.strategy},{child.intensity},{child.period}"
    return f"{{supervisor,{_atom(child.name)},{options},{_list(map(_child, child.children))}}}"


def _atom(name: str) -> str:
    return f"'{name}'"


def _list(terms: Iterable[str]) -> str:
    return f"[{','.join(terms)}]"
