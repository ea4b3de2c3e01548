"""Errors name an operation by the function that programs call, and not by the class of its message."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import trio_accel as ta
from trio_accel.backends.base import AccelError, function_of
from trio_accel.devices import Operation
from trio_accel.devices.operations._operation import operation_name

# Messages without a function that asks them, and who does.
INTERNAL = {
    "collectives.CloseCommunicator": "a world",
    "collectives.Join": "a world, whose error has the name of the collective",
    "collectives.MakeName": "a world",
    "collectives.OpenCommunicator": "a world",
    "devices.Stack": "a `Batcher`",
    "replay.NewBlock": "a replay",
}
# Classes that only others derive from, and those whose messages have the names of functions or of methods.
BASES = {
    "devices.RunChain",
    "collectives.OfRanks",
    "collectives._WithoutArrays",
    "devices._OfMemory",
    "programs._ProgramMessage",
}
BASES |= {"programs.Fetch", "programs.MethodCall", "programs.Ready", "programs.TellResult"}
# Parts of functions: their errors have the part's name, and begin with the function that the program called.
PARTS = {
    "arrays.SortAt",
    "linalg.CheckDiagonal",
    *{
        f"random.{name}"
        for name in ("Multiply", "Order", "Rejected", "Search", "SequenceBits", "SobolPoints")
    },
    *{
        f"sparse.{name}"
        for name in ("BsrToCsr", "CgSteps", "CheckStructure", "CooToCsr", "CsrToBsr", "CsrToCsc")
    },
    *{f"sparse.{name}" for name in ("ExtendBasis", "FindRows", "LeastResidual", "SolveFactored", "SumOfTwo")},
}
CLASSES = {"Generator": ta.random.Generator, "Graph": ta.graphs.Graph}
PACKAGES = ("arrays", "collectives", "fft", "graphs", "jit", "linalg", "nn", "programs", "random", "sparse")


def subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for derived in cls.__subclasses__():
        yield derived
        yield from subclasses(derived)


def messages() -> dict[str, type[Any]]:
    """The message classes of the package without names of their own, by the names of their operations."""
    for package in PACKAGES:
        found = importlib.import_module(f"trio_accel.{package}")
        for module in pkgutil.iter_modules(found.__path__, f"{found.__name__}."):
            importlib.import_module(module.name)
    own = {cls for cls in subclasses(Operation) if cls.__module__.startswith("trio_accel.")}
    return {
        operation_name(cls): cls
        for cls in own
        if cls.operation is Operation.operation and operation_name(cls) not in {*INTERNAL, *BASES}
    }


MESSAGES = messages()


def test_there_are_messages() -> None:
    assert {"linalg.Cholesky", "devices.Put", "graphs.While", "arrays.TopK", "tensor.Contract"} <= {
        *MESSAGES,
        "tensor.Contract",
    }
    assert len(MESSAGES) > 100


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_the_text_of_an_error_has_the_function(name: str) -> None:
    function = function_of(name)
    assert function != name
    owner, _, attribute = function.rpartition(".")
    places = [CLASSES.get(owner) or getattr(ta, owner)] if owner else [ta.Device, ta.AccelRef]
    assert any(callable(getattr(place, attribute, None)) for place in places) is (name not in PARTS)
    assert attribute == attribute.lower()
    error = AccelError("it failed", operation=name)
    assert str(error) == f"it failed (operation {function})"
    assert error.operation == name
    # Errors about crashes and mailboxes use this name.
    assert object.__new__(MESSAGES[name]).shown_name == function


async def test_errors_of_functions(device: ta.Device) -> None:
    x = await device.put(-np.eye(3))
    with pytest.raises(
        ta.LinAlgError, match=r"^linalg\.cholesky: .*, operation linalg\.cholesky, generation"
    ):
        await ta.linalg.cholesky(x)
    fault = ta.LibraryError("broken", library="blas", code=1)
    # The name that an error has is also one for faults.
    ta.testing.inject_fault(device, "linalg.scal", fail=fault)
    with pytest.raises(ta.LibraryError, match=r"operation linalg\.scal\b") as caught:
        await ta.linalg.scal(2.0, x)
    assert caught.value.operation == "linalg.Scal"
    y = await device.put(np.ones(3))
    ta.testing.inject_fault(device, ta.linalg.Nrm2, fail=RuntimeError("a bug"))
    with pytest.raises(ta.ActorFailedError, match=r"crashed while serving linalg\.nrm2 "):
        await ta.linalg.nrm2(y)


async def test_a_programs_own_operation_keeps_the_name_of_its_message(device: ta.Device) -> None:
    assert function_of("own_kernel.Blend") == "own_kernel.Blend"
    assert str(AccelError("it failed", operation="own_kernel.Blend")).endswith("(operation own_kernel.Blend)")
