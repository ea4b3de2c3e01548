"""The memory of an operation according to its specification."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import attrs
import pytest

from trio_accel import linalg
from trio_accel.backends.base import DType, ops
from trio_accel.backends.base.contract.ops import (
    ArraySpec,
    OperationSpec,
    StatusArray,
    exact,
    reads,
    scalar,
    specification,
    status,
    updates,
    writes,
)
from trio_accel.devices import DECLARED, AccelRef, Operand, operation

SPECS: list[Any] = [
    made
    for name in ops.__all__
    if isinstance(made := getattr(ops, name), type) and issubclass(made, OperationSpec) and attrs.has(made)
] + [function.spec for function in DECLARED.values() if function.spec is not None]


def array(block: int, offset: int = 0) -> ArraySpec:
    return ArraySpec(block, offset, DType.float32, (2,), (4,))


def filled(cls: Any) -> tuple[Any, dict[str, int]]:
    """A specification with each array in its own block, and the blocks by the names of the fields."""
    fields = cls.descriptor().fields
    blocks = {field.name: number for number, field in enumerate(fields, 7) if field.is_array}
    values: list[Any] = []
    for field in fields:
        # The sizes mean nothing here.
        value = array(blocks[field.name]) if field.is_array else 0
        values.append((value,) if field.role.count == "many" else value)
    return cls(*values), blocks


@specification
class Every(OperationSpec):
    a: ArraySpec = reads()
    n: int
    b: ArraySpec = updates()
    c: ArraySpec = writes()
    d: ArraySpec = reads()


@specification
class Nothing(OperationSpec):
    n: int


@specification
class Rich(OperationSpec):
    """Every role that there is."""

    mode: str = exact()
    bias: ArraySpec | None = reads(optional=True)
    terms: tuple[ArraySpec, ...] = reads(variadic=True)
    factor: float = scalar()
    outs: tuple[ArraySpec, ...] = writes(variadic=True)
    total: ArraySpec | None = updates(optional=True)


@specification
class Judged(OperationSpec):
    a: ArraySpec = reads()
    info: StatusArray = status()


def test_blocks_go_by_the_roles_of_the_fields() -> None:
    spec, at = filled(Every)
    assert spec.blocks() == ({at["a"], at["b"], at["d"]}, {at["b"], at["c"]})
    same = Every(array(3), 0, array(3), array(3), array(3))
    assert same.blocks() == ({3}, {3})
    assert Nothing(1).blocks() == (frozenset(), frozenset())
    assert Nothing(1).inputs() == Nothing(1).outputs() == ()


def test_optional_arrays_and_many() -> None:
    full = Rich("m", array(1), (array(2), array(3)), 0.5, (array(4),), array(5))
    assert full.blocks() == ({1, 2, 3, 5}, {4, 5})
    assert full.inputs() == (array(1), array(2), array(3), array(5))
    assert full.outputs() == (array(4), array(5))
    empty = Rich("m", None, (), 0.5, (), None)
    assert empty.blocks() == (frozenset(), frozenset())
    assert empty.inputs() == empty.outputs() == ()


def test_a_field_is_not_optional_and_many() -> None:
    made: Any = reads
    with pytest.raises(TypeError, match="an optional array or many"):
        made(optional=True, variadic=True)


def test_only_attrs_classes_have_a_descriptor() -> None:
    class Plain(OperationSpec):
        pass

    with pytest.raises(TypeError, match=r"a specification is an attrs class; .*Plain is not"):
        Plain.descriptor()


@pytest.mark.parametrize("cls", SPECS, ids=lambda cls: cls.__name__)
def test_blocks_match_the_arrays(cls: Any) -> None:
    spec, at = filled(cls)
    read, changed = spec.blocks()
    assert read == {used.block for used in spec.inputs()}
    assert changed == {used.block for used in spec.outputs()}
    assert read | changed == set(at.values())


def test_all_libraries_are_there() -> None:
    there = {cls.__name__ for cls in SPECS}
    assert there >= {"CopySpec", "FftSpec", "GraphSpec", "MatmulSpec", "PhiloxSpec", "ProgramCall"}
    assert {cls.operation for cls in SPECS} >= {"linalg.axpy", "linalg.cholesky", "linalg.svd", "sparse.spmv"}


@specification
class Told(OperationSpec):
    n: int = exact()
    names: tuple[str, ...] = exact()
    a: ArraySpec = reads()
    b: ArraySpec = writes()


def test_the_end_of_one_field_of_many_is_reported() -> None:
    a, b, c = array(1), array(2), array(3)
    moved = [
        Rich("m", a, (b,), 0.5, (c,), None),
        Rich("m", None, (a, b), 0.5, (c,), None),
        Rich("m", a, (), 0.5, (b, c), None),
        Rich("m", None, (a,), 0.5, (b,), c),
    ]
    assert len({spec.descriptor().plan_key(spec) for spec in moved}) == len(moved)


def test_equal_specifications_have_equal_fields_except_status_words() -> None:
    spec = linalg.cholesky.spec
    first = spec(array(1), False, array(2), None)
    same = spec(array(1), False, array(2), [0])
    assert (first, hash(first)) == (same, hash(same))
    assert first not in (spec(array(1), True, array(2), None), spec(array(1), False, array(3), None))
    assert Nothing(1) == Nothing(1) != Nothing(2)
    assert Nothing(1) != Every(array(1), 1, array(2), array(3), array(4)) != 1


def test_a_plan_is_compiled_at_its_first_use() -> None:
    @operation("a(n) -> out(n)", actor="trio_accel.linalg:BlasActor")
    async def halved(a: Operand) -> AccelRef:
        """Halve an array."""

    message: Any = halved.message
    assert type(vars(message)["plan"]) is not FunctionType
    plan = message.plan
    assert vars(message)["plan"] is plan is message.plan
    assert plan.__name__ == "plan"


def test_the_class_of_a_specification() -> None:
    arrays = [array(number) for number in range(3)]
    product, other = ops.MatmulSpec(*arrays), linalg.dot.spec(*arrays)
    assert product.descriptor().plan_key(product) != other.descriptor().plan_key(other)


def test_a_plan_is_for_layouts_and_not_for_addresses_or_numbers() -> None:
    key = linalg.axpy.spec.descriptor().plan_key
    first = key(linalg.axpy.spec(1.0, array(1), array(2)))
    assert first == key(linalg.axpy.spec(2.0, array(3), array(4, offset=64)))
    # An unaligned array may need another plan.
    assert first != key(linalg.axpy.spec(1.0, array(1), array(2, offset=4)))
    other = ArraySpec(1, 0, DType.float32, (2,), (8,))
    assert first != key(linalg.axpy.spec(1.0, other, array(2)))
