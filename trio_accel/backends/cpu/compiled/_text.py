"""C++ statements for a program's steps, in the form for processors (D186).

Each step has a level: ``ROW`` if it has one value in all loops of a row, ``COLUMN`` for one value in each
column, and ``ELEMENT`` for one value in each element. `_loops` writes the loops.

An index along a row may have a sum, `%`, a minimum or a maximum. Elements where these change nothing have a
loop of their own, with plain pointers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs

from ...base.contract.dtypes import DType
from ...base.expressions import Argument, TypedExpression, TypedStep, needed_steps
from ...base.expressions import _source as source
from ._functions import C_NAMES, VECTOR, VECTOR_FUNCTIONS

Access: TypeAlias = source.Access
Condition: TypeAlias = tuple[str, str | None, str | None]
"""A condition that the index along the row, plus a sum, is within bounds: C++ of the sum and both bounds."""

# Without it, g++ compiles `trunc` to casts to integers and back, which break -0.0, NaN and large numbers.
_ROUND_TRIP = '#pragma GCC optimize("trapping-math")\n'

_SHIFTS = {"add": "f_add", "subtract": "f_subtract"}
_STEPS = re.compile(r"\bt(\d+)")
_BOUNDS = ("remainder", "minimum", "maximum")
_INTEGER_LIMITS = {DType.int64: "", DType.int32: "2147483647"}


def head_of(program: TypedExpression) -> str:
    """Return the language and the functions that the text of a program begins with."""
    is_cut = any(
        step.function == "cast"
        and step.dtype.kind in ("int", "uint")
        and program.steps[step.steps[0]].dtype.is_inexact
        for step in program.steps
    )
    called = head(VECTOR & {step.function for step in program.steps})
    return f"{_ROUND_TRIP if is_cut else ''}{called}"


@functools.cache
def head(called: frozenset[str] = frozenset()) -> str:
    """Return the language of GPUs for a processor, and functions of our own.

    Args:
        called: The functions that the text calls.
    """
    folder = Path(__file__).parent
    before_prelude, _, after_prelude = (
        (folder / "processor.h").read_text(encoding="utf-8").partition("//PRELUDE\n")
    )
    lines = [before_prelude]
    if called & VECTOR:
        lines.append((folder / "functions.h").read_text(encoding="utf-8"))
        vector_names = sorted(called & frozenset(VECTOR_FUNCTIONS))
        for name in vector_names:
            lines += [f"LOOPED({name}, double, , 4, 8)", f"LOOPED({name}, float, f, 8, 16)"]
        lines += [
            f"template <class... T> OWN auto own_{name}{suffix}(T... x) {{ return own::{name}(x...); }}"
            for name in C_NAMES.values()
            for suffix in ("", "f")
        ]
        # The names come last, because the definitions before contain them.
        lines += [
            f"#define {name}{suffix} own_{name}{suffix}"
            for name in (*C_NAMES.values(), *vector_names)
            for suffix in ("", "f")
        ]
    return "\n".join((*lines, source.prelude(), after_prelude))


# The levels of steps.
ROW, COLUMN, ELEMENT = 0, 1, 2


@attrs.frozen
class LoopLayout:
    """Layouts of the arrays, as far as the source depends on them, whatever the extents are.

    Attributes:
        axes: The number of axes.
        access: How the elements of each array follow each other along the last axis, results first.
        dense: For each loaded or stored array, whether its elements are adjacent, by axes.
        reduced: The reduced axis, counted from the end: 0 for none, 1 for rows, 2 for columns.
        across: With columns, whether each array has several elements along the reduced axis.
    """

    axes: int
    access: tuple[Access, ...]
    dense: tuple[tuple[bool, ...], ...] = ()
    reduced: int = 0
    across: tuple[bool, ...] = ()


def depths_of(steps: Sequence[TypedStep]) -> list[int]:
    """Count the loops around each step."""
    depths, depth = list[int](), 0
    for step in steps:
        depth -= step.function == "end"
        depths.append(depth)
        depth += step.function == "loop"
    return depths


class Statements:
    """C++ statements for a program's steps.

    Args:
        program: The program.
        arguments: The form in which it gets its arguments.
        layout: The layouts of its arrays.

    Attributes:
        steps: The steps.
        outputs: The steps that make the results: outputs of the program, stores, and the loops around these.
        reductions: The steps that reduce.
        levels: The level of each step.
        memory: C++ of values that earlier loops have written to memory, by the numbers of the steps.
        plain: The loads with one index that is the index along the row plus a sum: its axis, and the sum.
        conditions: The conditions under which these loads are plain.
    """

    def __init__(self, program: TypedExpression, arguments: Sequence[Argument], layout: LoopLayout) -> None:
        self.program, self.layout, self.steps = program, layout, program.steps
        self.last = layout.axes - 1
        self._loaded = [number for number, _ in program.loads]
        # The begin of each loaded array's extents.
        self._extents, self._axes = list[int](), 0
        for _, count in program.loads:
            self._extents.append(self._axes)
            self._axes += count
        self._taken: list[str] = []
        self._array_of: dict[int, int] = {}
        self.dtypes = list(program.dtypes)
        self._scalars: list[str] = []
        for number, argument in enumerate(arguments):
            array = len(self.dtypes)
            if not argument.is_array:
                address = f"at_scalar(a.scalars[{len(self._scalars)}])"
                register = source.register_of(argument.dtype)
                self._taken.append(f"s{len(self._scalars)}")
                self._scalars.append(
                    f"const {register} s{len(self._scalars)} = {source.load(argument.dtype, address)};"
                )
            elif number in program.elements:
                self._array_of[number] = array
                self.dtypes.append(argument.dtype)
                self._taken.append(source.load(argument.dtype, self.address_of(array)))
            else:
                self._taken.append("")
        self.memory: dict[int, str] = {}
        self.reductions = [number for number, step in enumerate(self.steps) if step.is_reduction]
        self.stores = [number for number, step in enumerate(self.steps) if step.function.startswith("store_")]
        around = [
            number
            for number, step in enumerate(self.steps)
            if step.function == "end" and any(step.steps[0] < store < number for store in self.stores)
        ]
        self.outputs = [*program.outputs, *self.stores, *around]
        self._depths = depths_of(self.steps)
        self._differs = self._spread(is_whole=False)
        self.levels = self._spread(is_whole=True)
        self.plain: dict[int, tuple[int, str]] = {}
        self.conditions: list[Condition] = []
        # The operands of steps for elements where loads are plain.
        self._inside = list(self.steps)
        for number, step in enumerate(self.steps):
            if step.function == "load" and not (layout.reduced or self.stores):
                self._find_plain(number, step)

    def _level_of(self, step: TypedStep) -> int:
        """Return the level of a step, whatever its operands are."""
        if step.is_reduction:
            return COLUMN if self.layout.reduced == 2 else ROW
        if step.function == "index":
            return ELEMENT if self._axis(step) == self.last else ROW
        if step.function.startswith("store_"):
            # Each element stores, even if all of them store the same.
            return ELEMENT
        array = self._array_of.get(int(step.value.real)) if step.function == "argument" else None
        if array is None:
            return ROW
        is_same = self.layout.access[array] == "same"
        if self.layout.reduced == 2:
            return ELEMENT if self.layout.across[array] else ROW if is_same else COLUMN
        return ROW if is_same else ELEMENT

    def _spread(self, *, is_whole: bool) -> list[int]:
        """Find the levels of steps.

        Args:
            is_whole: Whether all steps of a loop have the level of its highest one, because a loop is not
                divided. Otherwise, only values that change have a high level: all elements count the same
                loops.
        """
        levels, previous = [ROW] * len(self.steps), list[int]()
        while levels != previous:
            previous = list(levels)
            for number, step in enumerate(self.steps):
                operands = () if step.is_reduction else step.steps
                if step.function == "loop" and not is_whole:
                    operands = operands[:1]
                levels[number] = max(
                    levels[number], self._level_of(step), *[levels[operand] for operand in operands]
                )
                if step.function in ("break", "end"):
                    values = step.steps[2 if step.function == "break" else 1 :]
                    carried = self.steps[step.steps[0]].steps[2:]
                    for carry, value in zip(carried, values, strict=True):
                        levels[carry] = max(levels[carry], levels[value])
                if step.function == "end" and is_whole:
                    loop = step.steps[0]
                    within = [*self.steps[loop].steps[2:], *range(loop, number + 1)]
                    highest = max(levels[inner] for inner in within)
                    for inner in within:
                        levels[inner] = highest
        return levels

    def is_array(self, number: int) -> bool:
        """Return whether a step reads the elements of an array."""
        step = self.steps[number]
        return step.function == "argument" and int(step.value.real) in self._array_of

    def _is_ahead(self, number: int) -> bool:
        """Return whether a value is computed before the loop of a row."""
        return self.levels[number] < ELEMENT and not self._depths[number]

    def address_of(self, array: int) -> str:
        """Return C++ for the address of an element: for element ``k`` of a row, or row ``j`` of columns."""
        size = self.dtypes[array].itemsize
        steps = {"same": "0", "dense": f"k * {size}", "strided": f"k * step{array}"}
        across = f" + j * across{array}" if self._is_across(array) else ""
        return f"p{array} + {steps[self.layout.access[array]]}{across}"

    def _is_across(self, array: int) -> bool:
        return self.layout.reduced == 2 and self.layout.across[array]

    def _axis(self, step: TypedStep) -> int:
        return int(step.value.real) % self.layout.axes

    def _find_plain(self, number: int, step: TypedStep) -> None:
        varying = [axis for axis, index in enumerate(step.steps) if self._differs[index]]
        bounded_shift = self._shift_of(step.steps[varying[0]]) if len(varying) == 1 else None
        if bounded_shift is not None:
            axis, (shift, conditions) = varying[0], bounded_shift
            extent = self._extent(step, axis)
            self.plain[number] = axis, shift
            self.conditions += [*conditions, (shift, "0", f"e{extent} - 1")]
            # The other term of the sum has steps of its own.
            other_indices = [index for dimension, index in enumerate(step.steps) if dimension != axis]
            self._inside[number] = attrs.evolve(
                step, steps=(*other_indices, *[int(digits) for digits in _STEPS.findall(shift)])
            )

    def _shift_of(self, number: int) -> tuple[str, tuple[Condition, ...]] | None:
        """Return a sum without the index along the row, and conditions; None if it is not such a sum."""
        step = self.steps[number]
        if step.function == "index":
            return "(i64)0", ()
        limit = _INTEGER_LIMITS.get(step.dtype)
        if limit is None or not step.steps:
            return None
        first, *invariants = step.steps
        if step.function == "add" and not self.levels[first]:
            first, invariants = invariants[0], [first]
        bounded_shift = self._shift_of(first) if self.levels[first] else None
        if bounded_shift is None or not all(map(self._is_ahead, invariants)):
            return None
        shift, conditions = bounded_shift
        if step.function == "cast" and self.steps[first].dtype in _INTEGER_LIMITS:
            pass
        elif step.function in _SHIFTS:
            shift = f"{_SHIFTS[step.function]}({shift}, (i64)t{invariants[0]})"
        elif step.function in _BOUNDS:
            bound = f"(i64)t{invariants[0]}"
            low = {"remainder": "0", "maximum": bound}.get(step.function)
            high = {"remainder": f"{bound} - 1", "minimum": bound}.get(step.function)
            conditions += ((shift, low, high),)
        else:
            return None
        if limit:
            conditions += ((shift, f"-{limit}", limit),)
        return shift, conditions

    def structure(self) -> str:
        """Return C++ of the language and the structure of arguments, which begins a source."""
        arrays, axes = max(len(self.dtypes), 1), self.layout.axes
        return f"""{head_of(self.program)}
enum {{ AXES = {axes}, ARRAYS = {len(self.dtypes)}, REDUCED = {self.layout.reduced} }};
struct Arguments {{
    char *p[{arrays}];
    char *q[{max(len(self._loaded), 1)}];
    Scalar scalars[{max(len(self._scalars), 1)}];
    i64 shape[{axes}], strides[{arrays}][{axes}], extents[{max(2 * self._axes, 1)}], pass;
}};"""

    def locals(self) -> Iterator[str]:
        """C++ of the variables that a function of a row begins with."""
        for array, access in enumerate(self.layout.access):
            kind = "char" if array < len(self.program.outputs) else "const char"
            yield f"{kind} *const p{array} = p[{array}];"
            if access == "strided":
                yield f"const i64 step{array} = a.strides[{array}][{self.last}];"
            if self._is_across(array):
                yield f"const i64 across{array} = a.strides[{array}][{self.last - 1}];"
        yield from (f"char *const q{array} = a.q[{array}];" for array in range(len(self._loaded)))
        yield from (
            f"const i64 e{number} = a.extents[{2 * number}], f{number} = a.extents[{2 * number + 1}];"
            for number in range(self._axes)
        )
        if self.layout.reduced:
            yield f"const i64 count = a.shape[{self.layout.axes - self.layout.reduced}];"
        else:
            yield from (f"const i64 x{axis} = x[{axis}];" for axis in range(self.last))
        yield from self._scalars

    def needed(self, numbers: Sequence[int], *, is_inside: bool = False) -> list[int]:
        """Return the steps that some steps need, in order, but not the operands of values in memory."""
        steps = self._inside if is_inside else self.steps
        required = needed_steps(steps, numbers, self.memory)
        read = {operand for number in required for operand in steps[number].steps}.union(numbers)
        return sorted(required | read.intersection(self.memory))

    def statement(
        self,
        number: int,
        prologue: list[str],
        lines: list[str],
        *,
        is_inside: bool = False,
        is_checking: bool = False,
    ) -> None:
        """Write the C++ of a step.

        Args:
            number: The step.
            prologue: The lines before the loop, for parts of loads that are the same in the whole row.
            lines: The lines to append the step to.
            is_inside: Whether loads are plain.
            is_checking: Whether to check the indices of stores instead of storing.
        """
        step = self.steps[number]
        if of_loop := source.loop_lines(number, self.steps):
            lines += of_loop
            return
        if number in self.stores:
            checks = [line for axis in range(len(step.indices)) for line in self._check(step, axis)]
            lines += checks if is_checking else self._store(step)
            return
        if number in self.memory:
            value = self.memory[number]
        elif step.function == "index":
            value = "k" if self._axis(step) == self.last else f"x{self._axis(step)}"
        elif step.function == "count":
            value = "count"
        elif step.function == "load":
            value = self._load(number, step, prologue, lines, is_inside=is_inside)
        else:
            value = source.value_of(step, self._taken, self.steps)
        lines.append(f"const {source.register_of(step.dtype)} t{number} = {value};")

    def _extent(self, step: TypedStep, axis: int) -> int:
        """Return the number of an extent and stride: along an axis of a loaded or stored array."""
        return self._extents[self._loaded.index(int(step.value.real))] + axis

    def _check(self, step: TypedStep, axis: int) -> list[str]:
        """C++ that checks an index of a load or a store, unless it is ``i(axis)``."""
        index = step.indices[axis]
        if not self.program.checked or self.steps[index].function == "index":
            return []
        return [f"bad |= is_outside(t{index}, e{self._extent(step, axis)});"]

    def _load(
        self, number: int, step: TypedStep, prologue: list[str], lines: list[str], *, is_inside: bool
    ) -> str:
        """Return C++ of a load; its address and checks are computed before the loop as far as possible."""
        array = self._loaded.index(int(step.value.real))
        same, parts = [f"q{array}"], list[str]()
        for axis, index in enumerate(step.steps):
            extent = self._extent(step, axis)
            if is_inside and number in self.plain and self.plain[number][0] == axis:
                size = f"{step.dtype.itemsize}" if self.layout.dense[array][axis] else f"f{extent}"
                parts.append(f"k * {size}")
                same.append(f"{self.plain[number][1]} * {size}")
                continue
            is_ahead = self._is_ahead(index)
            (same if is_ahead else parts).append(f"reached(t{index}, e{extent}, f{extent})")
            # A loop of no iterations checks nothing.
            (prologue if is_ahead and not self._depths[number] else lines).extend(self._check(step, axis))
        prologue.append(f"const char *const r{number} = {' + '.join(same)};")
        return source.load(step.dtype, " + ".join((f"r{number}", *parts)))

    def _store(self, step: TypedStep) -> list[str]:
        """C++ that combines a value with an element."""
        array, element = self._loaded.index(int(step.value.real)), source.element_of(step.dtype)
        address, value, there = [f"q{array}"], f"t{step.steps[0]}", list[str]()
        for axis, index in enumerate(step.indices):
            extent = self._extent(step, axis)
            address.append(f"reached(t{index}, e{extent}, f{extent})")
        reduce = step.function.removeprefix("store_")
        if reduce in source.COMBINING:
            value = source.call_of(source.COMBINING[reduce], step.dtype, ("there", value))
            there = [f"const {source.register_of(step.dtype)} there = {source.load(step.dtype, 'at')};"]
        return [
            "{",
            f"char *const at = (char *)({' + '.join(address)});",
            *there,
            f"{element}::store(at, {value});",
            "}",
        ]
