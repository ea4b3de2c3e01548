"""A library that forks a child at its import; a variable of the environment selects the kind."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from trio_accel.linalg import BlasActor

__all__ = ["BlasActor", "leave_chains", "leave_child"]

# More than one processor's worth, and few enough for a machine that others use.
_CHAINS = 60
VARIABLE = "TRIO_ACCEL_TEST_CHILD"


def leave_child(kind: str) -> None:
    """Start a process that outlives this one if nobody ends it.

    Args:
        kind: ``fork``, by Python; ``c``, by the C library; ``system``, a program; ``daemon``, an orphan in a
            session of its own; or ``tree``, a child with a child.
    """
    if kind == "system":
        ctypes.CDLL(None).system(b"sleep 600 &")
        return
    child = ctypes.PyDLL(None).fork() if kind == "c" else os.fork()
    if child == 0:
        if kind == "daemon":
            os.setsid()
        if kind in ("fork", "c") or os.fork() == 0 or kind == "tree":
            while True:
                signal.pause()
        os._exit(0)
    if kind == "daemon":
        os.waitpid(child, 0)


def leave_chains() -> None:
    """Start processes in sessions of their own that fork the next and end, for half a minute at most."""
    end = time.monotonic() + 30
    for _ in range(_CHAINS):
        if os.fork() == 0:
            os.setsid()
            while time.monotonic() < end:
                if os.fork():
                    os._exit(0)
            os._exit(0)


if VARIABLE in os.environ:
    leave_child(os.environ[VARIABLE])
