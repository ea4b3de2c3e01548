"""The commands and their options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter, Token, UnusedCliTokensError
from cyclopts.validators import Number

import trio_accel as ta
from trio_accel.cli._board import make_console
from trio_accel.cli._demo import run_demo
from trio_accel.cli._info import show_info
from trio_accel.cli._matmul import MatmulStep
from trio_accel.cli._recover import RecoverStep
from trio_accel.cli._run import InputError, Isolation
from trio_accel.cli._solve import SolveStep
from trio_accel.cli._spectrum import SpectrumStep
from trio_accel.cli._trace import trace_program

__all__ = ["Backend", "Flag", "IsolationOption", "Json", "run", "run_app"]

_LARGEST_SIZE = 16384
_EXIT_CODES = (
    "Exit codes: 0 every check holds, 1 a check fails, 2 an input or an option cannot be used, "
    "130 ended by Ctrl-C."
)


def _parse_sizes(_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    words = [word.strip() for token in tokens for word in token.value.split(",")]
    if not all(word.isascii() and word.isdigit() and 1 <= int(word[:9]) <= _LARGEST_SIZE for word in words):
        given = ",".join(words)
        raise ValueError(
            f"must be whole numbers from 1 to {_LARGEST_SIZE} with commas between them, got {given!r}"
        )
    return tuple(int(word) for word in words)


def _format_sizes(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


Backend = Annotated[str | None, Parameter(name="--backend", show_default=False)]
IsolationOption = Annotated[Isolation | None, Parameter(name="--isolation", show_default=False)]
Json = Annotated[bool, Parameter(name="--json", negative=(), show_default=False)]
_File = Annotated[Path | None, Parameter(show_default=False)]
_Sizes = Annotated[
    tuple[int, ...],
    Parameter(
        converter=_parse_sizes, n_tokens=1, accepts_keys=False, negative=(), show_default=_format_sizes
    ),
]
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
_Order = Literal["tree", "rate", "queue", "flight", "p50", "p99", "failed", "restarts"]
_Count = Annotated[int, Parameter(validator=Number(gte=1, lte=64))]

app = App(
    name="trio-accel",
    help="Accelerators as supervised Trio actors.",
    version=ta.__version__,
    version_format="plaintext",
    result_action="return_value",
)
demo = App(name="demo", usage="Usage: trio-accel demo [NAME] [OPTIONS]", help_epilogue=_EXIT_CODES)
app.command(demo)


@app.command
def info(*, json: Json = False) -> int:
    """Show devices, their libraries and versions.

    Works without any accelerator; says why there is none.

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

    The file is written as the program runs, and is whole also after Ctrl-C and after an error. Open it at
    https://ui.perfetto.dev.

    Args:
        program: Python file to run.
        arguments: Its arguments; what stands behind PROGRAM is never an option of this command.
        output: File to write; an existing one is replaced.
        module: PROGRAM is the name of a module, as behind python -m.
    """
    return trace_program(program, arguments, output, is_module=module)


@app.command(
    usage="Usage: trio-accel top [NAME|PID|PATH] [OPTIONS]",
    help_epilogue="Exit codes: 0 the user left, 1 the program ended or does not answer, 2 there is no such "
    "program, or an option cannot be used, 130 ended by Ctrl-C.",
)
def top(
    program: Annotated[str | None, Parameter(show_default=False)] = None,
    /,
    *,
    interval: Annotated[float, Parameter(validator=Number(gte=0.1, lte=60))] = 1.0,
    sort: _Order = "tree",
    filter: Annotated[str, Parameter(show_default=False)] = "",  # noqa: A002
    once: Flag = False,
    json: Json = False,
) -> int:
    """Show the actors and devices of a running program, live.

    The program has opened a socket, by ta.telemetry.open_socket(system). The key ? lists the keys. Where
    standard output is no terminal, one snapshot is printed.

    Args:
        program: Name of the socket, number of the process, or path of the socket. Default: the only one there
            is.
        interval: Seconds between two snapshots, 0.1 to 60.
        sort: Order of the actors at the beginning.
        filter: Show only actors with this text in their path, class or state.
        once: Print one snapshot and end.
        json: Print one JSON document and nothing else.
    """
    # Needs a terminal as POSIX has it.
    from trio_accel.cli._top import show_top

    return show_top(program, interval=interval, sort=sort, text=filter, is_once=once, is_json=json)


@demo.default
def tour(*, backend: Backend = None, isolation: IsolationOption = None, json: Json = False) -> int:
    """Run four demonstrations on real input, and check every result.

    Without a name all four run one after the other, on input that comes with the package. With a name
    that one runs alone, and takes options of its own.

    Args:
        backend: Device to use, such as cpu or cuda:1. Default: $TRIO_ACCEL_BACKEND, else the best there is.
        isolation: Where the device computes: in this process or in a worker. Default: for recover in a
            worker where it can, for the others the backend's.
        json: Print one JSON document and nothing else.
    """
    steps = (MatmulStep(), SpectrumStep(is_picture_required=False), SolveStep(), RecoverStep())
    return run_demo(steps, backend, isolation, json)


@demo.command(sort_key=0)
def matmul(
    *,
    sizes: _Sizes = (256, 512, 1024),
    clients: _Count = 4,
    dtype: Literal["float32", "float64"] = "float32",
    backend: Backend = None,
    isolation: IsolationOption = None,
    json: Json = False,
) -> int:
    """Multiply matrices for several clients at once, beside bare NumPy.

    Device and NumPy take turns in the same run; the figures are medians. Every product is compared with
    NumPy in float64.

    Args:
        sizes: Rows and columns of the square operands, with commas between them.
        clients: Tasks that ask at the same time.
        dtype: Element type of the operands.
        backend: Device to use, such as cpu or cuda:1. Default: $TRIO_ACCEL_BACKEND, else the best there is.
        isolation: Where the device computes: in this process or in a worker. Default: the backend's.
        json: Print one JSON document and nothing else.
    """
    return run_demo([MatmulStep(sizes=sizes, clients=clients, dtype=dtype)], backend, isolation, json)


@demo.command(sort_key=1)
def spectrum(
    *,
    audio: _File = None,
    output: Path = Path("spectrogram.png"),
    backend: Backend = None,
    isolation: IsolationOption = None,
    json: Json = False,
) -> int:
    """Draw the spectrogram of a recording.

    Needs Matplotlib: pip install '.[plot]' in a checkout. Every spectrum is compared with SciPy in float64.

    Args:
        audio: WAV file (PCM or float, any number of channels). Default: a sentence read aloud.
        output: PNG file to write; an existing one is replaced.
        backend: Device to use, such as cpu or cuda:1. Default: $TRIO_ACCEL_BACKEND, else the best there is.
        isolation: Where the device computes: in this process or in a worker. Default: the backend's.
        json: Print one JSON document and nothing else.
    """
    return run_demo([SpectrumStep(audio=audio, output=output)], backend, isolation, json)


@demo.command(sort_key=2)
def solve(
    *,
    matrix: _File = None,
    rtol: float = 1e-10,
    max_iterations: Annotated[int | None, Parameter(validator=Number(gte=1), show_default=False)] = None,
    backend: Backend = None,
    isolation: IsolationOption = None,
    json: Json = False,
) -> int:
    """Solve a linear system by conjugate gradients.

    The right-hand side is 1 in every row. The residual is recomputed and the solution compared with SciPy
    in float64.

    Args:
        matrix: Matrix Market file, plain or .gz, symmetric positive definite. Default: the stiffness matrix
            of a dam.
        rtol: Residual at which to stop, relative to the right-hand side.
        max_iterations: Iterations allowed. Default: ten per row, at least 1000.
        backend: Device to use, such as cpu or cuda:1. Default: $TRIO_ACCEL_BACKEND, else the best there is.
        isolation: Where the device computes: in this process or in a worker. Default: the backend's.
        json: Print one JSON document and nothing else.
    """
    if not 0.0 < rtol < 1.0:
        raise InputError(f"--rtol must be between 0 and 1, got {rtol:g}")
    step = SolveStep(matrix=matrix, rtol=rtol, max_iterations=max_iterations)
    return run_demo([step], backend, isolation, json)


@demo.command(sort_key=3)
def recover(
    *, rounds: _Count = 1, backend: Backend = None, isolation: IsolationOption = None, json: Json = False
) -> int:
    """Crash, poison and kill under load, and show the fate of every request.

    Four clients ask for products while the BLAS actor is crashed, the context is poisoned, its worker
    process is killed, and an operation hangs; on a GPU kernels trap and fail an assertion, too. Inline, in
    this process, only the first two can be survived. Prints the tree of actors and the hashes of arrays
    before and after, and how long each fault was felt; every result is compared with NumPy in float64.

    Args:
        rounds: How often each fault is injected.
        backend: Device to use, such as cpu or cuda:1. Default: $TRIO_ACCEL_BACKEND, else the best there is.
        isolation: Where the device computes. Default: in a worker process where it can.
        json: Print one JSON document and nothing else.
    """
    return run_demo([RecoverStep(rounds=rounds)], backend, isolation, json)


def run(arguments: Sequence[str]) -> int:
    """Parse ``arguments`` and run the command they name.

    Returns:
        The exit code.

    Raises:
        InputError: The arguments are wrong, or what they name cannot be used.
    """
    return run_app(app, _end_options(list(arguments)))


def run_app(app: App, arguments: Sequence[str]) -> int:
    """Parse ``arguments`` and run the command of ``app`` that they name; else as `run`."""
    try:
        code = app(arguments, console=make_console(), exit_on_error=False, print_error=False)
    except UnusedCliTokensError as error:
        raise InputError(_describe_unused(error)) from error
    except CycloptsError as error:
        raise InputError(str(error)) from error
    return code if isinstance(code, int) else 0


def _end_options(arguments: list[str]) -> list[str]:
    """Arguments behind the program of `trace` are the program's."""
    if arguments[:1] != ["trace"] or "--" in arguments:
        return arguments
    index = 1
    while index < len(arguments) and arguments[index].startswith("-"):
        index += 2 if arguments[index] in ("-o", "--output") else 1
    return [*arguments[:index], "--", *arguments[index:]] if index < len(arguments) else arguments


def _describe_unused(error: UnusedCliTokensError) -> str:
    unused = " ".join(error.unused_tokens or ())
    names = ", ".join(name for name in demo if not name.startswith("-"))
    if error.command_chain and tuple(error.command_chain) == ("demo",):
        return f"there is no demo {unused!r}; there are {names}"
    return f"too many arguments: {unused}"
