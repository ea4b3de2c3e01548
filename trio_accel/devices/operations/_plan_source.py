"""Writes the source of a declared operation's plan, and contains the functions that it calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol, cast

from ...backends.base import DType, Ints, Strs
from ...backends.base.contract.ops import KINDS, ArraySpec, Item, Shapes, check_index, column, real_of
from ..base._refusals import bounded_integer, shown
from ._operation import Planned, Planner
from ._ref import AccelRef


class Structured(Protocol):
    """A class for operands with several arrays, such as sparse matrices.

    In a line of shapes, a parameter with this annotation has its shape, followed by its arrays:
    ``"matrix(m, n), matrix.data(e)"``. Objects have `shape`, `dtype` and `device`, and the arrays by name.

    Attributes:
        operand_fields: The names of the arrays.
        made_by: The function that makes such operands.
    """

    operand_fields: ClassVar[Strs]
    made_by: ClassVar[str]
    __name__: str


class PlanSource:
    """The plan for one line of shapes: ``plan(self, planner)``, as an author would write it.

    Args:
        kinds: The kind of each parameter; see `Declaration.parameters`.
        line: The shapes.
        fields: The arguments of the specification, in order.
        absent: The results of other lines of shapes only.

    Attributes:
        names: The objects to which the source refers by name.
    """

    def __init__(
        self, kinds: Mapping[str, Any], line: Shapes, fields: Sequence[str], absent: frozenset[str]
    ) -> None:
        self._kinds = kinds
        self._line = line
        self._fields = fields
        self._absent = absent
        self._optional: set[str] = set()
        self.names: dict[str, Any] = dict(_STEPS)

    def text(
        self,
        optional: set[str],
        dtypes: Sequence[DType],
        alias: Mapping[str, str],
        check: Any,
        *,
        is_checked: bool,
    ) -> str:
        """Write the source.

        Args:
            optional: The parameters that may be None.
            dtypes: The dtypes of the arrays; empty if the kernels determine them.
            alias: The operand that each result may be, by the name of the result.
            check: Refuses a specification, if the shapes do not suffice; or None.
            is_checked: Whether these steps are all checks of the specification.
        """
        self._optional = optional
        replies = [f"self.{name}" for name in self._line.updated]
        steps = ["name = planner.name", *self._values(), *self._reads(), *self._dtypes(dtypes)]
        steps += [*self._numbers(), self._fit()]
        for index, item in enumerate(self._line.outputs):
            replies.append(f"{item.name}_ref")
            steps += self._output(index, item, alias.get(item.name))
        steps += [
            f"planner.distinct({name!r}, {name}{self._distinct_operands(name)})"
            for name in self._line.updated
        ]
        for item in (*self._line.inputs, *self._line.outputs):
            if item.optional:
                steps.append(f"if is_flat: {item.name} = column({item.name})")
        if "info" in self._fields:
            steps.append("info = planner.status(prod(stack))")
        values = ", ".join(
            "None" if name in self._absent else self._field_value(name) for name in self._fields
        )
        reply = {0: "None", 1: replies[0] if replies else ""}.get(
            len(replies), f"Reply({', '.join(replies)})"
        )
        steps.append(f"spec = Spec({values})")
        if check is not None:
            self.names["check"] = check
            steps.append("check(name, spec)")
        steps.append(f"return Planned(spec, {reply}, None, {is_checked})")
        return "def plan(self, planner):\n" + "\n".join(f"    {step}" for step in steps)

    def _field_value(self, name: str) -> str:
        """Write a field of the specification; an operand of several arrays becomes its shape."""
        return f"{name}.shape" if isinstance(self._kinds.get(name), type) else name

    def _values(self) -> list[str]:
        """Write the steps for exact values."""
        steps = check_steps(self._kinds, self.names)
        for name, kind in self._kinds.items():
            if kind in ("whole", "text"):
                steps.append(f"{name} = {kind}(name, {name!r}, self.{name})")
            elif kind == "bool":
                steps.append(f"{name} = bool(self.{name})")
            elif isinstance(kind, tuple):
                steps.append(f"{name} = self.{name}")
        return steps

    def _reads(self) -> list[str]:
        """Write the steps for operands, in the order of the parameters."""
        items = {item.name: item for item in self._line.inputs}
        steps: list[str] = []
        for name, kind in self._kinds.items():
            if isinstance(kind, type):
                class_name = f"CLASS_{name}"
                self.names[class_name] = kind
                refusal = f"refuse_type(name, {name!r}, {class_name}, {name})"
                steps += [f"{name} = self.{name}", f"if not isinstance({name}, {class_name}): {refusal}"]
                arrays = [item for item in items.values() if item.name.startswith(f"{name}.")]
                steps += [f"{item.field} = planner.read({item.name!r}, {item.name})" for item in arrays]
            if isinstance(kind, type) or name not in items:
                continue
            if name in self._line.updated:
                steps.append(f"{name} = planner.update({name!r}, self.{name})")
            else:
                unless = f"None if self.{name} is None else " if name in self._optional else ""
                steps.append(f"{name} = {unless}planner.read({name!r}, self.{name})")
        return steps

    def _dtypes(self, dtypes: Sequence[DType]) -> list[str]:
        """Write the checks of the operands' dtypes."""
        first, *remaining = [item.field for item in self._line.inputs if not item.kind]
        steps = [f"dtype = {first}.dtype"]
        if dtypes:
            self.names["DTYPES"] = tuple(dtypes)
            steps.append(f"if dtype not in DTYPES: refuse_dtype(name, {first!r}, dtype, DTYPES)")
        operands = ", ".join(f"{name}={name}" for name in (first, *remaining))
        for name in remaining:
            unless = f"{name} is not None and " if name in self._optional else ""
            steps.append(f"if {unless}{name}.dtype is not dtype: planner.refuse_dtypes({operands})")
        indexes = [item for item in self._line.inputs if item.kind == "index"]
        if indexes:
            pairs = "".join(f"({item.name!r}, {item.field}), " for item in indexes)
            steps.append(f"check_index(name, ({pairs}))")
        for item in self._line.inputs:
            if item.kind and item not in indexes:
                expected = self._dtype_of(item)
                steps.append(
                    f"if {item.name}.dtype is not {expected}: "
                    f"refuse_dtype(name, {item.name!r}, {item.name}.dtype, ({expected},))"
                )
        return steps

    def _dtype_of(self, item: Item) -> str:
        if not item.kind:
            return "dtype"
        self.names[f"KIND_{item.kind}"] = KINDS[item.kind]
        return f"KIND_{item.kind}(dtype)"

    def _numbers(self) -> list[str]:
        """Write the steps for factors."""
        steps: list[str] = []
        for name, kind in self._kinds.items():
            if kind == "number":
                steps.append(f"{name} = planner.factor({name!r}, self.{name}, dtype)")
            elif kind == "real":
                steps.append(f"{name} = planner.factor({name!r}, self.{name}, real_of(dtype)).real")
        return steps

    def _fit(self) -> str:
        """Write the step that determines the shapes of the results."""
        shapes = [
            f"{item.name} and {item.name}.shape" if item.name in self._optional else f"{item.field}.shape"
            for item in self._line.inputs
        ]
        letters = [item.op for item in self._line.inputs if item.op]
        arguments, ops = (
            f"({''.join(f'{argument}, ' for argument in names)})" for names in (shapes, letters)
        )
        return f"shapes, stack, is_flat = fit(name, {arguments}, {ops})"

    def _output(self, index: int, item: Item, alias: str | None) -> list[str]:
        """Write the steps that make a result."""
        name, like = item.name, f"shapes[{index}], {self._dtype_of(item)}"
        if name not in self._kinds:
            return [f"{name}_ref = planner.output({like})", f"{name} = {name}_ref.spec"]
        steps: list[str] = []
        if alias is None and "beta" in self._kinds:
            steps = [f"if self.{name} is None and beta != 0: refuse_beta(name, {name!r}, self.beta)"]
        if alias is not None or name != "out":
            arguments = f"planner, {name!r}, self.{name}, ({like}), {alias!r}{self._distinct_operands(name)}"
            return [*steps, f"{name}_ref, {name} = written({arguments})"]
        return [
            *steps,
            f"{name}_ref = planner.output({like}, self.{name})",
            f"{name} = {name}_ref.spec",
            f"if self.{name} is not None: planner.distinct({name!r}, {name}{self._distinct_operands(name)})",
        ]

    def _distinct_operands(self, name: str) -> str:
        """Return the operands that must not share memory with a written array, as arguments."""
        names: list[str] = []
        for item in self._line.inputs:
            if item.name == name:
                break
            if not isinstance(self._kinds.get(item.name), type):
                names.append(item.field)
        else:
            return "".join(f", {operand}={operand}" for operand in names)
        # Compare a changed array with the changed arrays before it, and with all read arrays.
        later_items = self._line.inputs[self._line.inputs.index(item) + 1 :]
        names += [later.name for later in later_items if later.name not in self._line.updated]
        return "".join(f", {operand}={operand}" for operand in names)


def check_steps(kinds: Mapping[str, Any], names: dict[str, Any]) -> list[str]:
    """Write the steps that refuse values outside of the annotations: flags, and values of a ``Literal``.

    Args:
        kinds: The kind of each parameter.
        names: Receives the objects to which the steps refer by name.
    """
    steps: list[str] = []
    for name, kind in kinds.items():
        if kind == "bool" or isinstance(kind, tuple):
            # Values are looked up by hash, because comparing an array with a value gives another array. A
            # value that equals an allowed one, such as -0.0 or a NumPy number, is replaced by it.
            allowed = (False, True) if kind == "bool" else cast("tuple[object, ...]", kind)
            names[f"ALLOWED_{name}"] = dict(zip(allowed, allowed, strict=True))
            steps.append(
                f"if self.{name}.__hash__ is None or self.{name} not in ALLOWED_{name}: "
                f"refuse_value(planner.name, {name!r}, ALLOWED_{name}, self.{name})"
            )
            if kind != "bool":
                steps.append(f"self.{name} = ALLOWED_{name}[self.{name}]")
    return steps


def refuse_value(name: str, argument: str, allowed: Iterable[object], value: object) -> NoReturn:
    """Refuse a value that a ``Literal`` does not allow."""
    said = " or ".join(", ".join(map(repr, allowed)).rsplit(", ", 1))
    raise ValueError(f"{name}: {argument} must be {said}, got {shown(value)}")


def _refuse_type(name: str, argument: str, expected: type[Structured], value: object) -> NoReturn:
    raise TypeError(
        f"{name}: {argument} must be a {expected.__name__}, got {type(value).__name__}; "
        f"use {expected.made_by}"
    )


def _refuse_dtype(name: str, argument: str, dtype: DType, allowed: Sequence[DType]) -> NoReturn:
    names = ", ".join(map(str, allowed))
    raise TypeError(f"{name}: {argument} has dtype {dtype}; allowed: {names} (use cast())")


def _refuse_beta(name: str, argument: str, beta: complex) -> NoReturn:
    raise ValueError(f"{name}: beta must be 0 without {argument}, got {beta!r}")


def _text(name: str, argument: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: {argument} must be a str, got {value!r}")
    return value


def written(
    planner: Planner,
    argument: str,
    ref: AccelRef | None,
    like: tuple[Ints, DType],
    alias: str | None = None,
    **operands: ArraySpec,
) -> tuple[AccelRef, ArraySpec]:
    """Use an array to change: a new one, or the caller's, which may be the operand `alias`."""
    if ref is None:
        ref = planner.output(*like)
        return ref, ref.spec
    array = planner.update(argument, ref)
    if (array.shape, array.dtype) != like:
        raise ValueError(
            f"{planner.name}: {argument} must have shape {like[0]} and dtype {like[1]}, "
            f"got shape {array.shape} and dtype {array.dtype}"
        )
    if alias is not None and operands[alias] == array:
        del operands[alias]
    planner.distinct(argument, array, **operands)
    return ref, array


_STEPS: Mapping[str, Any] = {
    "Planned": Planned,
    "check_index": check_index,
    "column": column,
    "prod": math.prod,
    "real_of": real_of,
    "refuse_beta": _refuse_beta,
    "refuse_dtype": _refuse_dtype,
    "refuse_type": _refuse_type,
    "refuse_value": refuse_value,
    "text": _text,
    "whole": bounded_integer,
    "written": written,
}
