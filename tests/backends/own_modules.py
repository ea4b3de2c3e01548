"""Modules of kernels that tests make on the fly, and specifications for them."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from trio_accel.backends.base import LibraryError
from trio_accel.backends.base.contract.ops import (
    ArraySpec,
    OperationSpec,
    StatusArray,
    exact,
    reads,
    scalar,
    specification,
    status,
    writes,
)

_NUMBERS = itertools.count()


@specification
class Moved(OperationSpec):
    """Something that a test's kernel makes of one array."""

    source: ArraySpec = reads()
    out: ArraySpec = writes()
    way: str = exact()


@specification
class Every(OperationSpec):
    """One field of each role: ``out[i] = factor * terms[i]``, and after these the bias if there is one.

    The status: the number of rows made, and 0 or the code of the refusal.
    """

    terms: tuple[ArraySpec, ...] = reads(variadic=True)
    bias: ArraySpec | None = reads(optional=True)
    out: ArraySpec = writes()
    fails: int = exact()
    factor: float = scalar()
    made: StatusArray = status()

    def check_status(self) -> None:
        """Refuse the arguments that the kernel finds wrong."""
        if self.made[1]:
            raise LibraryError(f"row {self.made[1]} is bad", library="every", code="bad_row")


def install(monkeypatch: pytest.MonkeyPatch, **names: Any) -> str:
    """Make a module with these names; returns its import path."""
    module = types.ModuleType(f"kernels_of_tests_{next(_NUMBERS)}")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


Installer = Callable[..., str]
