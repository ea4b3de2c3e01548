"""The commands and their options; the run of a program with its timeline."""

from __future__ import annotations

import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

from cyclopts import App, CycloptsError, Parameter, UnusedCliTokensError
from cyclopts.validators import Number

import trio_accel as ta
from trio_accel.cli._console import make_console
from trio_accel.cli._info import show_info
from trio_accel.cli._recover import run_recover
from trio_accel.cli._replay import run_replay, show_journal
from trio_accel.cli._run import InputError, InterruptError
from trio_accel.cli._top import show_top

_EXIT_CODES = (
    "Exit codes: 0 every check holds, 1 a check fails, 2 an input or an option cannot be used, "
    "130 ended by Ctrl-C."
)


Backend = Annotated[str | None, Parameter(name="--backend", show_default=False)]
Json = Annotated[bool, Parameter(name="--json", negative=(), show_default=False)]
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
_Count = Annotated[int, Parameter(validator=Number(gte=1, lte=64))]

app = App(
    name="trio-accel",
    help="Accelerators as supervised Trio actors.",
    version=ta.__version__,
    version_format="plaintext",
    result_action="return_value",
)
demo = App(name="demo", usage="Usage: trio-accel demo [recover] [OPTIONS]", help_epilogue=_EXIT_CODES)
app.command(demo)


@app.command
def info(*, json: Json = False) -> int:
    """Show devices, their libraries and versions.

    Works without any accelerator, and shows why none is available.

    Args:
        json: Print one JSON document and nothing else.
    """
    return show_info(is_json=json)


@app.command(
    usage="Usage: trio-accel trace [OPTIONS] PROGRAM [ARGS...]",
    help_epilogue="Exit codes: the program's; 2 where it or the file cannot be used, 130 ended by Ctrl-C.",
)
def trace(
    program: str,
    /,
    *arguments: str,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("trace.json"),
    module: Annotated[bool, Parameter(name=["--module", "-m"], negative=(), show_default=False)] = False,
) -> int:
    """Run a Python program, and write a timeline of its actors and devices.

    The file is written as the program runs, and is complete even after Ctrl-C or an error. Open it at
    https://ui.perfetto.dev.

    Args:
        program: Python file to run.
        arguments: Its arguments; options after PROGRAM never belong to this command.
        output: File to write; an existing one is replaced.
        module: PROGRAM is the name of a module, as after python -m.
    """
    if not module and not Path(program).is_file():
        raise InputError(f"program {program} does not exist")
    try:
        opened = ta.telemetry.timeline(None, output)
        written = opened.__enter__()
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}") from error
    try:
        return _run_program(program, arguments, is_module=module)
    finally:
        opened.__exit__(None, None, None)
        path = output.resolve()
        print(f"trio-accel: {written.events} events in {path}", file=sys.stderr)
        print("trio-accel: open it at https://ui.perfetto.dev, or in chrome://tracing", file=sys.stderr)


@app.command(help_epilogue="Exit codes: 0 after Ctrl-C, 1 no dashboard answers or its program ended.")
def top(url: str, /, *, once: Flag = False) -> int:
    """Show a running program live: its devices, messages, figures and actors.

    The program has opened a dashboard, by ta.open_dashboard(system), on this machine. Ctrl-C ends the view.

    Args:
        url: Address of the dashboard, which the program has as dashboard.url; its port is enough.
        once: Print a complete snapshot and end. This is the default if standard output is not a terminal.
    """
    return show_top(url, is_once=once)


@app.command(
    help_epilogue="Exit codes: 0 all is the same, 1 something differs, 2 the journal cannot be replayed."
)
def replay(
    file: Path,
    /,
    *,
    device: Annotated[str | None, Parameter(show_default=False)] = None,
    against: Annotated[str | None, Parameter(show_default=False)] = None,
    until: Annotated[int | None, Parameter(show_default=False, validator=Number(gte=1))] = None,
    tolerance: Annotated[float | None, Parameter(show_default=False, validator=Number(gte=0))] = None,
    programs: Flag = False,
) -> int:
    """Run the operations of a journal again, and name the first one that differs.

    Args:
        file: Journal that a program has recorded, by ta.replay.record.
        device: Device to use, such as cpu or cuda:1. Default: $TRIO_ACCEL_BACKEND, else the best available.
        against: Device to compare with, operation by operation and step by step, instead of the journal.
        until: Number of the last operation.
        tolerance: Maximum difference of elements, both relative and absolute. Default: equal bits.
        programs: Run the code that the journal names. Otherwise it is refused.
    """
    return run_replay(
        file, device=device, against=against, until=until, tolerance=tolerance, allows_programs=programs
    )


@app.command(help_epilogue="Exit codes: 0, 2 it is not a journal.")
def journal(file: Path, /) -> int:
    """Show the operations of a journal, with marks and failures. Nothing of it runs.

    Args:
        file: Journal that a program has recorded, by ta.replay.record.
    """
    return show_journal(file)


@demo.default
@demo.command
def recover(*, rounds: _Count = 1, backend: Backend = None, json: Json = False) -> int:
    """Crash, poison and kill under load, and show the effects on requests and arrays.

    Clients request products from a device in a worker process. Meanwhile the BLAS actor is crashed, the
    context is poisoned, the worker process is killed, and an operation hangs; on a GPU kernels also trap and
    fail an assertion. Prints the tree of actors, the hashes of arrays before and after, and the duration of
    each fault; every result is compared with NumPy in float64.

    Args:
        rounds: How often each fault is injected.
        backend: Device to use, such as cpu or cuda:1. Default: $TRIO_ACCEL_BACKEND, else the best available.
        json: Print one JSON document and nothing else.
    """
    return run_recover(rounds=rounds, backend=backend, is_json=json)


def run(arguments: Sequence[str]) -> int:
    """Parse ``arguments`` and run the selected command.

    Returns:
        The exit code.

    Raises:
        InputError: The arguments are wrong, or name something unusable.
    """
    return run_app(app, _end_options(list(arguments)))


def run_app(app: App, arguments: Sequence[str]) -> int:
    """Parse ``arguments`` and run the selected command of ``app``; otherwise as `run`."""
    try:
        code = app(arguments, console=make_console(), exit_on_error=False, print_error=False)
    except UnusedCliTokensError as error:
        raise InputError(f"too many arguments: {' '.join(error.unused_tokens or ())}") from error
    except CycloptsError as error:
        raise InputError(str(error)) from error
    return code if isinstance(code, int) else 0


def _end_options(arguments: list[str]) -> list[str]:
    """Mark the arguments after the program of `trace` as the program's."""
    if arguments[:1] != ["trace"] or "--" in arguments:
        return arguments
    index = 1
    while index < len(arguments) and arguments[index].startswith("-"):
        index += 2 if arguments[index] in ("-o", "--output") else 1
    return [*arguments[:index], "--", *arguments[index:]] if index < len(arguments) else arguments


def _run_program(program: str, arguments: Sequence[str], *, is_module: bool) -> int:
    original = sys.argv, sys.path[:]
    sys.argv = [program, *arguments]
    sys.path.insert(0, "" if is_module else str(Path(program).resolve().parent))
    # Ctrl-C belongs to the program: Trio converts it to a KeyboardInterrupt only with Python's own handler.
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
        sys.argv, sys.path[:] = original
    return 0


def _is_interrupt(error: BaseException) -> bool:
    """Return whether it is a group of only interrupts."""
    if not isinstance(error, BaseExceptionGroup):
        return False
    group = cast("BaseExceptionGroup[BaseException]", error)
    return group.split(KeyboardInterrupt)[1] is None


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1
