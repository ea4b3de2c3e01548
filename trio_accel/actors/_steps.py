"""Running a coroutine up to where it first waits, and then the rest of it."""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import TypeVar

import trio

__all__ = ["first_step", "go_on"]

T = TypeVar("T")


def first_step(running: Coroutine[object, object, T], context: Context) -> object:
    """Run a coroutine in a context until it first waits.

    Returns:
        What it waits for, in Trio's terms: to be handed to `go_on`, in the same task and without
        another checkpoint in between. The task runs in the context from then on.

    Raises:
        StopIteration: It has returned, without waiting.
        BaseException: What it raised.
    """
    task = trio.lowlevel.current_task()
    if task.context is context:
        return running.send(None)
    trap = context.run(running.send, None)
    # Takes effect when Trio resumes the task.
    task.context = context
    return trap


@types.coroutine
def go_on(running: Coroutine[object, object, T], trap: object) -> Generator[object, object, T]:
    """The rest of a coroutine that waits for something."""
    try:
        while True:
            try:
                value = yield trap
            except BaseException as error:  # noqa: ASYNC103, BLE001  # the coroutine sees to it
                trap = running.throw(error)
            else:
                trap = running.send(value)
    except StopIteration as returned:
        result: T = returned.value
        return result
    finally:
        running.close()
