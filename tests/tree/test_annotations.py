"""Public types are usable in annotations that Python evaluates, because not every module defers them."""

from __future__ import annotations

import importlib
import pkgutil
import types
from collections.abc import Iterator
from typing import Any, Optional, Union

import pytest

import trio_accel

# Values other than types, and types known by their names.
NO_TYPES = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodType)


def packages() -> Iterator[str]:
    yield "trio_accel"
    for module in pkgutil.walk_packages(trio_accel.__path__, "trio_accel."):
        words = module.name.split(".")
        # The stand-in for a GPU is a program, and its names are a driver's.
        if not any(word.startswith("_") for word in words) and "stand_in" not in words and "cli" not in words:
            yield module.name


def types_of(name: str) -> Iterator[tuple[str, Any]]:
    """Yield the public names of a package in the style of types."""
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        value = getattr(module, public)
        if public[0].isupper() and not public.isupper() and not isinstance(value, NO_TYPES):
            yield public, value


def refusals(value: Any) -> list[str]:
    """Return the annotations in which a type is an error."""

    class Typed:
        pass

    forms = {
        "{} | None": lambda: value | None,
        "None | {}": lambda: None | value,
        "Optional[{}]": lambda: Optional[value],  # noqa: UP045  # as older code has it
        "Union[{}, int]": lambda: Union[value, int],  # noqa: UP007
        "list[{}] | None": lambda: list[value] | None,
        "dict[str, {}]": lambda: dict[str, value],
        "tuple[{}, ...] | int": lambda: tuple[value, ...] | int,
    }
    found = []
    for form, make in forms.items():
        try:
            Typed.__annotations__["x"] = make()
        except TypeError as error:
            found.append(f"{form}: {error}")
    return found


@pytest.mark.parametrize("name", [*packages()])
def test_public_types_are_usable_in_annotations_at_run_time(name: str) -> None:
    wrong = {public: found for public, value in types_of(name) if (found := refusals(value))}
    assert wrong == {}


def test_the_types_of_guides_are_among_them() -> None:
    found = {f"{name}.{public}" for name in packages() for public, _ in types_of(name)}
    assert found >= {
        *(
            "trio_accel.AccelRef",
            "trio_accel.Ref",
            "trio_accel.cluster.Saved",
            "trio_accel.cluster.EntityRef",
        ),
        *("trio_accel.train.Batch", "trio_accel.train.Batches", "trio_accel.signal.Window"),
        *("trio_accel.devices.Operand", "trio_accel.cluster.Nodes", "trio_accel.graphs.Body"),
    }


def test_a_text_is_refused_as_an_alias() -> None:
    """The test of the test: an alias given as a text is found."""
    assert [one.partition(":")[0] for one in refusals("Mapping[str, Any]")] == ["{} | None", "None | {}"]
