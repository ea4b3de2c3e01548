"""The command line, ``trio-accel``. Uses the public names of ``trio_accel`` only."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import errno
import io
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["main"]

_BROKEN_PIPE = 141
_OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_INTERRUPTED = 130
# Codes above this one: a signal, or a closed pipe, ended the command in the middle.
_SIGNAL = 128
# Name of the way to encode what an encoding lacks: a sign of ours as the sign nearest to it.
_PLAIN = "trio_accel.plain"
_PLAIN_SIGNS = dict(zip("✓✗×·→└├│─━…µ", "+!x*>`||--.u", strict=True))


def main(
    arguments: Sequence[str] | None = None,
    *,
    run: Callable[[Sequence[str]], int] | None = None,
    name: str = "trio-accel",
) -> int:
    """Run the command line.

    Args:
        arguments: The arguments after the program's name, ``sys.argv[1:]`` by default.
        run: Does the work, and may raise the errors of the commands; ``None`` for the commands of
            ``trio-accel``.
        name: The program's name in front of an error.

    Returns:
        The exit code: 0 on success, if every check holds; 1 if a check or a step failed; 2 for unusable
        input; 130 after Ctrl-C; 141 when standard output was closed early.
    """
    is_program = arguments is None
    ending = _Ending()
    if is_program:
        # Registered first, so that it is called last.
        atexit.register(ending.leave)
    try:
        ending.code = _dispatch(sys.argv[1:] if arguments is None else arguments, run, name)
    except KeyboardInterrupt:
        # The command has not taken over the signal yet, or has given it back.
        ending.code = _complain(name, "interrupted", _INTERRUPTED)
    except BrokenPipeError:
        _discard_output()
        ending.code = _BROKEN_PIPE
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS:
            raise
        _discard_output()
        ending.code = _complain(name, f"cannot write the output: {os.strerror(error.errno).lower()}", 1)
    return ending.code


def _discard_output() -> None:
    """Replace the output by a null device, because Python flushes once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class _Ending:
    """The end of the program."""

    code = 0

    def leave(self) -> None:
        """After a signal, end now: OpenBLAS would wait for the product that a thread is computing."""
        if self.code <= _SIGNAL:
            # Everything is done, and Python is about to restore the default: a signal would end the process.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, AttributeError):
                stream.flush()
        os._exit(self.code)


def _dispatch(arguments: Sequence[str], run: Callable[[Sequence[str]], int] | None, name: str) -> int:
    # Our own signs and names from a file may be characters that the terminal's encoding lacks.
    codecs.register_error(_PLAIN, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_PLAIN)

    import trio_accel as ta
    from trio_accel.cli._run import FAILURES, exit_code_of, printable

    if run is None:
        from trio_accel.cli import _app

        run = _app.run
    try:
        code = run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except FAILURES as error:
        is_named = isinstance(error, ta.AccelError | ta.ActorError)
        text = f"{type(error).__name__}: {error}" if is_named else str(error)
        return _complain(name, "\n".join(map(printable, text.splitlines())), exit_code_of(error))
    return code


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN_SIGNS.get(char, "?") for char in lacking), error.end


def _complain(name: str, message: str, code: int) -> int:
    print(f"{name}: {message}", file=sys.stderr)
    return code
