"""Impossible numbers in everything that takes numbers, except functions of arrays."""

from __future__ import annotations

import inspect
import math
import pkgutil
import re
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import trio
from chosen import BACKEND, ROOT
from number_calls import CALLS, MADE, UNSAID, Place
from test_large_numbers import FREE, FUNCTIONS, OF_REAL, REFUSALS

import trio_accel as ta
from trio_accel.devices import Operation

sys.path.insert(0, str(ROOT / "docs"))
from internal_names import INTERNAL

NUMBERS = (2**63, 2**64, 2**70, -(2**70), 10**400, sys.float_info.max, math.inf, math.nan)
_NUMBER = re.compile(r"\bint\b|\bfloat\b|\bcomplex\b(?!')|\bShape\b|LaunchRule|_Axis|\bExtents\b")
# Code that backends implement, and code that uses only the public names.
_OTHERS = ("backends", "cli", "interop")


def _numbers_of(one: Any) -> list[str]:
    """Return the arguments for numbers; none of an error, which the package makes."""
    if inspect.isclass(one) and issubclass(one, BaseException):
        return []
    with suppress(ValueError, TypeError):
        given = inspect.signature(one).parameters.values()
        return [each.name for each in given if _NUMBER.search(str(each.annotation))]
    return []


def _public() -> dict[str, Any]:
    """Return functions, classes and methods of the public names that take numbers."""
    found: dict[str, Any] = {}
    for module in pkgutil.iter_modules(ta.__path__):
        if module.name.startswith("_") or module.name in _OTHERS:
            continue
        package = import_module(f"trio_accel.{module.name}")
        for name in {*package.__all__} - INTERNAL.get(package.__name__, frozenset()):
            one = getattr(package, name)
            found[f"{module.name}.{name}"] = one
            if inspect.isclass(one) and not issubclass(one, BaseException):
                # A base of specifications lacks a descriptor.
                methods = [each for each in dir(one) if not each.startswith("_") and each != "described"]
                found |= {f"{name}.{each}": getattr(one, each) for each in methods}
    return {name: one for name, one in found.items() if _numbers_of(one) or _has_no_function(one)}


def _has_no_function(one: Any) -> bool:
    """Return whether it is a message without a function of its name, whose plan it would share."""
    if not inspect.isclass(one) or not issubclass(one, Operation):
        return False
    package = sys.modules[".".join(one.__module__.split(".")[:2])]
    return not any(getattr(each, "message", None) is one for each in vars(package).values())


PUBLIC = _public()


def test_nothing_that_takes_a_number_is_left_out() -> None:
    tried = {*CALLS, *FUNCTIONS, *OF_REAL, *FREE, *MADE}
    assert {*PUBLIC} - tried == set()
    assert {*MADE} - {*PUBLIC} == set()


@pytest.fixture
async def place(system: ta.System, isolation: ta.Isolation, tmp_path: Path) -> AsyncGenerator[Place, None]:
    """A device without memory for large arrays, with arrays and a world."""
    options = ta.DeviceOptions(isolation=isolation, memory_limit=1 << 28)
    async with system.open_device(BACKEND, options=options) as device, ta.open_world([device]) as world:
        yield Place(
            system=system,
            device=device,
            vector=await device.put(np.arange(3.0)),
            plane=await device.put(np.eye(4)),
            matrix=await ta.sparse.csr(device, scipy.sparse.csr_array(np.eye(4))),
            world=world,
            folder=tmp_path,
        )


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_numbers_are_refused_in_the_task_that_gives_them(place: Place, name: str) -> None:
    for argument in UNSAID.get(name) or _numbers_of(PUBLIC[name]):
        for number in NUMBERS:
            with trio.fail_after(60), suppress(*REFUSALS):
                called = CALLS[name](place, {argument: number})
                if inspect.isawaitable(called):
                    await called
    # An argument that passes all checks crashes an actor, or the context.
    assert place.device.generation == 1
    await (await ta.arrays.add(place.vector, 1.0)).to_host()
