"""A command that prints one JSON document, whatever becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio_accel as ta
from trio_accel.cli._errors import InputError
from trio_accel.cli._run import InterruptError, run_async

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["run_for_json"]


def run_for_json(job: Callable[[], Awaitable[int]], render: Callable[[int, str | None], str]) -> int:
    """Run ``job`` under Trio and print the document, also where the job fails.

    Args:
        job: The command; returns its exit code.
        render: Makes the document, given the exit code and the error if there is one.

    Raises:
        InputError, InterruptError, AccelError, ActorError: As the job did, after the document is printed.
    """
    try:
        code = run_async(job)
    except InputError as error:
        print(render(2, str(error)))
        raise
    except (ta.AccelError, ta.ActorError) as error:
        print(render(1, str(error)))
        raise
    except InterruptError as error:
        print(render(128 + error.signal, "interrupted"))
        raise
    print(render(code, None))
    return code
