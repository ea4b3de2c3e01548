"""What specifications say of the memory that an operation touches."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from trio_accel.backends.base import DType, ops
from trio_accel.backends.base.ops import ArraySpec, OperationSpec, exact, reads, updates, writes

SPECS: list[Any] = [
    made
    for name in ops.__all__
    if isinstance(made := getattr(ops, name), type) and issubclass(made, OperationSpec) and attrs.has(made)
]


def array(block: int) -> ArraySpec:
    return ArraySpec(block, 0, DType.float32, (2,), (4,))


def filled(cls: Any) -> tuple[Any, dict[str, int]]:
    """One whose arrays lie in blocks of their own, and these by the names of the fields."""
    names = [field.name for field in attrs.fields(cls)]
    arrays = {field.name for field in attrs.fields(cls) if field.type in ("ArraySpec", ArraySpec)}
    blocks = {name: number for number, name in enumerate(names, 7) if name in arrays}
    # The sizes mean nothing here.
    return cls(*(array(blocks[name]) if name in blocks else 0 for name in names)), blocks


@attrs.frozen
class Every(OperationSpec):
    a: ArraySpec = reads()  # noqa: RUF009  # a field specifier
    n: int = attrs.field()
    b: ArraySpec = updates()  # noqa: RUF009  # the same
    c: ArraySpec = writes()  # noqa: RUF009  # the same
    d: ArraySpec = reads()  # noqa: RUF009  # the same


@attrs.frozen
class Nothing(OperationSpec):
    n: int = attrs.field()


def test_blocks_go_by_the_roles_of_the_fields() -> None:
    spec, at = filled(Every)
    assert spec.blocks() == ({at["a"], at["b"], at["d"]}, {at["b"], at["c"]})
    same = Every(array(3), 0, array(3), array(3), array(3))
    assert same.blocks() == ({3}, {3})
    assert Nothing(1).blocks() == (frozenset(), frozenset())
    assert Nothing(1).inputs() == Nothing(1).outputs() == ()


@pytest.mark.parametrize("cls", SPECS, ids=lambda cls: cls.__name__)
def test_blocks_are_those_of_the_arrays(cls: Any) -> None:
    spec, at = filled(cls)
    read, changed = spec.blocks()
    assert read == {used.block for used in spec.inputs()}
    assert changed == {used.block for used in spec.outputs()}
    assert read | changed == set(at.values())


def test_all_libraries_are_there() -> None:
    assert {cls.__module__.rpartition(".")[2] for cls in SPECS} == {
        "fft",
        "linalg",
        "memory",
        "random",
        "sparse",
    }


@attrs.frozen
class Told(OperationSpec):
    n: int = exact()
    names: tuple[str, ...] = exact()
    a: ArraySpec = reads()  # noqa: RUF009  # a field specifier
    b: ArraySpec = writes()  # noqa: RUF009  # the same


def test_what_is_told_by_its_arrays_and_what_is_exact() -> None:
    a, b = array(1), array(2)
    first = Told(3, ("x",), a, b).identity()
    assert first == Told(3, ("x",), a, b).identity()
    # One that is equal is another array all the same.
    others = [(4, ("x",), a, b), (3, ("y",), a, b), (3, ("x",), b, a), (3, ("x",), array(1), b)]
    assert first not in [Told(*fields).identity() for fields in others]
    # Of a number that may be a zero with a sign, nothing is told.
    assert Every(a, 0, b, a, b).identity() is None


def test_specifications_that_come_again_are_known() -> None:
    known = {cls for cls in SPECS if filled(cls)[0].identity() is not None}
    told = {"MatmulSpec", "DotSpec", "Nrm2Spec", "CopySpec", "FftSpec", "SpmvCsrSpec"}
    assert {cls.__name__ for cls in known} == told


def test_of_which_class_it_is() -> None:
    arrays = [array(number) for number in range(3)]
    assert ops.MatmulSpec(*arrays).identity() != ops.DotSpec(*arrays).identity()
