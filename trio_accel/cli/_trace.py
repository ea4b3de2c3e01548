"""The command `trace`: a Python program with a timeline."""

from __future__ import annotations

import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import trio_accel as ta
from trio_accel.cli._run import InputError, InterruptError

__all__ = ["trace_program"]


def trace_program(program: str, arguments: Sequence[str], output: Path, *, is_module: bool) -> int:
    """Run a program with the timeline of all systems that it opens.

    Args:
        program: Python file, or the name of a module.
        arguments: Its ``sys.argv``.
        output: File for the timeline.
        is_module: Whether it is a module.

    Returns:
        The program's exit code.

    Raises:
        InputError: There is no such program, or the file cannot be written.
        InterruptError: The program was interrupted.
    """
    if not is_module and not Path(program).is_file():
        raise InputError(f"there is no program {program}")
    try:
        opened = ta.telemetry.timeline(None, output)
        written = opened.__enter__()
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}") from error
    try:
        return _run(program, arguments, is_module=is_module)
    finally:
        opened.__exit__(None, None, None)
        where = output.resolve()
        print(f"trio-accel: {written.events} events in {where}", file=sys.stderr)
        print("trio-accel: open it at https://ui.perfetto.dev, or in chrome://tracing", file=sys.stderr)


def _run(program: str, arguments: Sequence[str], *, is_module: bool) -> int:
    before = sys.argv, sys.path[:]
    sys.argv = [program, *arguments]
    sys.path.insert(0, "" if is_module else str(Path(program).resolve().parent))
    # Ctrl-C is the program's: Trio makes a KeyboardInterrupt of it only if Python's own handler is there.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as error:
        return _code_of(error)
    except KeyboardInterrupt:
        raise InterruptError(signal.SIGINT) from None
    except BaseException as error:  # noqa: BLE001, ASYNC103  # as Python itself does, outside of any run
        if _is_interrupt(error):
            raise InterruptError(signal.SIGINT) from None  # noqa: ASYNC104
        traceback.print_exception(error)
        return 1  # noqa: ASYNC104
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if handler is None else handler)
        sys.argv, sys.path[:] = before
    return 0


def _is_interrupt(error: BaseException) -> bool:
    """Tell whether it is a group of nothing but interrupts."""
    if not isinstance(error, BaseExceptionGroup):
        return False
    group = cast("BaseExceptionGroup[BaseException]", error)
    return group.split(KeyboardInterrupt)[1] is None


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1
