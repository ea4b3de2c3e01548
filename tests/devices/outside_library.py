"""A library from outside, kernels included: operations with optional and many arrays, and status words.

The device finds it by its import path, in the program and in a worker. It imports nothing of a backend.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import attrs
import numpy as np

import trio_accel as ta
from trio_accel.backends.base import HostCall, KernelCall, kernel, ops
from trio_accel.devices import DeclaredSpec, LibraryActor, Operand, Operation, Planned, Planner, operation


@ops.specification
class StackSpec(ops.OperationSpec):
    """``out[i] = factor * terms[i]``, and after these the bias if there is one."""

    terms: tuple[ops.ArraySpec, ...] = ops.reads(variadic=True)
    bias: ops.ArraySpec | None = ops.reads(optional=True)
    out: ops.ArraySpec = ops.writes()
    factor: float = ops.scalar()
    bad_row: int = ops.exact()
    # How many rows were made, and which one is bad.
    made: ops.StatusArray = ops.status()

    def check_status(self) -> None:
        if self.made[1]:
            raise ta.LibraryError(f"row {self.made[1]} is bad", library="outside", code="bad_row")


@ops.specification
class NegateSpec(ops.OperationSpec):
    """Arrays are negated in place, and one more if there is one."""

    arrays: tuple[ops.ArraySpec, ...] = ops.updates(variadic=True)
    more: ops.ArraySpec | None = ops.updates(optional=True)


class OutsideActor(LibraryActor):
    library = __name__


class Stacked(NamedTuple):
    array: ta.AccelRef
    rows: int


@attrs.frozen(eq=False)
class Stack(Operation[OutsideActor, Stacked]):
    terms: tuple[Operand, ...]
    bias: Operand | None = None
    factor: float = 1.0
    bad_row: int = 0
    # Raised in the task that waits.
    refuse: str = ""
    library: ClassVar[str] = f"{__name__}:OutsideActor"

    def plan(self, planner: Planner) -> Planned[Stacked]:
        terms = tuple(planner.read(f"terms[{i}]", term) for i, term in enumerate(self.terms))
        bias = None if self.bias is None else planner.read("bias", self.bias)
        rows = [*terms, *([] if bias is None else [bias])]
        if len({(row.shape, row.dtype) for row in rows}) != 1:
            raise ValueError(f"{planner.name}: rows of one shape and dtype, at least one")
        out = planner.output((len(rows), *rows[0].shape), rows[0].dtype)
        made = planner.status(2)

        def finish() -> Stacked:
            if self.refuse:
                raise ValueError(self.refuse)
            return Stacked(out, int(made[0]))

        return Planned(StackSpec(terms, bias, out.spec, self.factor, self.bad_row, made), finish=finish)


@attrs.frozen(eq=False)
class Negate(Operation[OutsideActor, None]):
    arrays: tuple[ta.AccelRef, ...]
    more: ta.AccelRef | None = None
    library: ClassVar[str] = f"{__name__}:OutsideActor"

    def plan(self, planner: Planner) -> Planned[None]:
        arrays = tuple(planner.update(f"arrays[{i}]", array) for i, array in enumerate(self.arrays))
        more = None if self.more is None else planner.update("more", self.more)
        return Planned(NegateSpec(arrays, more))


@attrs.frozen(eq=False)
class Careless(Operation[OutsideActor, None]):
    """The arguments are the fields of the specification."""

    arrays: Any
    more: Any = None
    library: ClassVar[str] = f"{__name__}:OutsideActor"

    def plan(self, planner: Planner) -> Planned[None]:
        return Planned(NegateSpec(self.arrays, self.more))


@ops.specification
class BrokenSpec(ops.OperationSpec):
    """The error of its kernel, or the result."""

    how: str = ops.exact()


@attrs.frozen(eq=False)
class Broken(Operation[OutsideActor, None]):
    how: str
    library: ClassVar[str] = f"{__name__}:OutsideActor"

    def plan(self, planner: Planner) -> Planned[None]:
        return Planned(BrokenSpec(self.how))


@kernel(BrokenSpec, backend="cpu")
@kernel(BrokenSpec, backend="cuda")
def broken(spec: BrokenSpec, call: KernelCall) -> str | None:
    if spec.how == "refuses":
        raise ta.LibraryError("refused", library="outside", code="how")
    if spec.how == "raises":
        raise RuntimeError("broken on purpose")
    return spec.how if spec.how == "returns something" else None


@kernel(StackSpec, backend="cpu")
def stack_cpu(spec: StackSpec, call: HostCall) -> None:
    out = call.array(spec.out)
    for row, term in zip(out, spec.terms, strict=False):
        np.multiply(call.array(term), spec.factor, out=row)
    if spec.bias is not None:
        out[-1] = call.array(spec.bias)
    spec.made[:] = len(out), spec.bad_row


@kernel(StackSpec, backend="cuda")
def stack_cuda(spec: StackSpec, call: Any) -> None:
    out = call.array(spec.out)
    rows = [*((spec.factor, term) for term in spec.terms), *([] if spec.bias is None else [(1.0, spec.bias)])]
    for number, (factor, row) in enumerate(rows):
        array = call.array(row)
        at = attrs.evolve(out, address=out.address + number * out.strides[0], shape=array.shape)
        call.convert(array, attrs.evolve(at, strides=out.strides[1:]), scale=factor)
    words = call.status(spec.made)
    for number, value in enumerate((len(rows), spec.bad_row)):
        call.fill(
            attrs.evolve(out, address=words + 4 * number, dtype=ta.DType.int32, shape=(), strides=()), value
        )


@kernel(NegateSpec, backend="cpu")
def negate_cpu(spec: NegateSpec, call: HostCall) -> None:
    for one in (*spec.arrays, *([] if spec.more is None else [spec.more])):
        array = call.array(one)
        np.negative(array, out=array)


@kernel(NegateSpec, backend="cuda")
def negate_cuda(spec: NegateSpec, call: Any) -> None:
    for array in (*spec.arrays, *([] if spec.more is None else [spec.more])):
        call.convert(call.array(array), call.array(array), scale=-1.0)


@operation("a(n), other(n) -> out(n)", actor=OutsideActor)
async def either(a: Operand, other: Operand | None = None) -> ta.AccelRef:
    """The other array, or the contents of `a` if there is no other."""


@kernel(either, backend="cpu")
def either_cpu(spec: DeclaredSpec, call: HostCall) -> None:
    call.array(spec.out)[:] = call.array(spec.a if spec.other is None else spec.other)


@kernel(either, backend="cuda")
def either_cuda(spec: DeclaredSpec, call: Any) -> None:
    call.convert(call.array(spec.a if spec.other is None else spec.other), call.array(spec.out))
