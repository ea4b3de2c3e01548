"""A module that only the program can import: a worker fails over it."""

from __future__ import annotations

import os

from trio_accel.devices import LibraryActor

if "TRIO_ACCEL_TEST_BROKEN" in os.environ:
    raise ImportError("this module is broken on purpose")


class BrokenActor(LibraryActor):
    library = "blas"


class ExitingActor(LibraryActor):
    """Ends the process that opens it."""

    library = "blas"

    def __init__(self, engine: object) -> None:
        os._exit(3)
