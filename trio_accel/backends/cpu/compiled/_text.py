"""C++ of expressions in the form for processors: rows of the last axis, element behind element (D186).

What stays the same along a row stands before its loop, because a compiler leaves branches inside. An index
along a row may have a sum, `%`, a minimum or a maximum: elements where these change nothing have a loop of
their own, with plain pointers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs

from ...base.contract.dtypes import DType
from ...base.contract.ops import Reduce
from ...base.expressions import Argument, SpecializedExpression, Step, TypedExpression, places_of
from ...base.expressions import _source as source
from ._functions import FAR, OWN, VECTOR

Access: TypeAlias = source.Access
Condition: TypeAlias = tuple[str, str | None, str | None]
"""That the index along a row, and so much more, is within bounds: C++ of the sum, and of both."""

# Without it, g++ takes `trunc` for a cast to whole numbers and back: -0.0, NaN and what is too large stay.
_ROUND_TRIP = '#pragma GCC optimize("trapping-math")\n'

_SHIFTS = {"add": "f_add", "subtract": "f_subtract"}
_STEPS = re.compile(r"\bt(\d+)")
_BOUNDS = ("remainder", "minimum", "maximum")
_WHOLE = {DType.int64: "", DType.int32: "2147483647"}


@attrs.frozen
class RowLayout:
    """Layouts of the arrays, as far as the text depends on them, whatever the extents are.

    Attributes:
        axes: How many there are.
        access: How elements of each array follow each other along the last axis, results first.
        dense: For each array that elements are loaded from, whether they lie side by side, for each axis.
    """

    axes: int
    access: tuple[Access, ...]
    dense: tuple[tuple[bool, ...], ...] = ()


def head_of(*parts: TypedExpression) -> str:
    """Return what the text of expressions begins with."""
    steps = [(step, typed.steps) for typed in parts for step in typed.steps if step.function == "cast"]
    is_cut = any(
        step.dtype.kind in ("int", "uint") and others[step.steps[0]].dtype.is_inexact
        for step, others in steps
    )
    called = head(frozenset[str]().union(*map(called_by, parts)))
    return f"{_ROUND_TRIP if is_cut else ''}{called}"


@functools.cache
def head(called: frozenset[str] = frozenset()) -> str:
    """Return the language of GPUs for a processor, and functions of our own.

    Args:
        called: The functions that the text calls.
    """
    here = Path(__file__).parent
    before, _, behind = (here / "processor.h").read_text(encoding="utf-8").partition("//PRELUDE\n")
    lines = [before]
    if called & VECTOR:
        lines.append((here / "functions.h").read_text(encoding="utf-8"))
        far = sorted(called & frozenset(FAR))
        for name in far:
            lines += [f"LOOPED({name}, double, , 4, 8)", f"LOOPED({name}, float, f, 8, 16)"]
        lines += [f"template <class... T> OWN auto own_{name}{suffix}(T... x) {{ return own::{name}(x...); }}"
                  for name in OWN.values() for suffix in ("", "f")]  # fmt: skip
        # The names stand behind all others, which have them in their text.
        lines += [f"#define {name}{suffix} own_{name}{suffix}"
                  for name in (*OWN.values(), *far) for suffix in ("", "f")]  # fmt: skip
    return "\n".join((*lines, source.prelude(), behind))


def called_by(typed: TypedExpression) -> frozenset[str]:
    """Return the functions of our own that an expression calls."""
    return VECTOR & {step.function for step in typed.steps}


@functools.lru_cache(256)
def elementwise_text(expression: str, layout: RowLayout) -> str:
    """Write the source of an expression of each element.

    Args:
        expression: A text of `SpecializedExpression.encode`.
        layout: The layouts of its arrays.
    """
    decoded = SpecializedExpression.decode(expression)
    rows = Rows(decoded.typed, decoded.arguments, layout, len(decoded.typed.outputs))
    loops = [rows.loop("row_anywhere", is_apart=bool(rows.plain))]
    if rows.plain:
        loops.append(rows.loop("row_inside", is_inside=True))
    return "\n".join((rows.structure(), *loops, rows.whole("row_anywhere"), _RUN))


@functools.lru_cache(256)
def scatter_text(expression: str, reduce: Reduce, layout: RowLayout) -> str:
    """Write the source that combines values with elements at computed places, one behind another.

    All indices are looked at before anything is stored.

    Args:
        expression: As in `elementwise_text`; its results are an element of a place, and a value.
        reduce: How values are combined with elements.
        layout: The layouts of its arrays.
    """
    decoded = SpecializedExpression.decode(expression)
    load, value = decoded.typed.outputs
    typed, dtype = places_of(decoded.typed), decoded.typed.steps[value].dtype
    rows = Rows(typed, decoded.arguments, layout, 0)
    axes = range(len(typed.outputs) - 1)
    checks = [f"bad |= is_outside(t{typed.outputs[axis]}, e{axis});" for axis in axes
              if decoded.typed.steps[decoded.typed.steps[load].steps[axis]].function != "index"]  # fmt: skip
    steps = [f"reached(t{typed.outputs[axis]}, e{axis}, f{axis})" for axis in axes]
    element, made, there = source.element_of(dtype), f"t{value}", ""
    if reduce != "set":
        made = source.call_of(source.COMBINING[reduce], dtype, ("there", made))
        there = f"const {source.register_of(dtype)} there = {source.load(dtype, 'at')};"
    store = [
        f"char *const at = (char *){' + '.join(('q0', *steps))};",
        there,
        f"{element}::store(at, {made});",
    ]
    loops = [rows.loop("row_checked", stores=checks), rows.loop("row_stored", stores=store, in_order=True)]
    whole = rows.whole("a.pass ? row_stored : row_checked")
    return "\n".join((rows.structure(), *loops, whole, _RUN))


def depths_of(steps: Sequence[Step]) -> list[int]:
    """Count, for each step, the loops that are around it."""
    found, depth = list[int](), 0
    for step in steps:
        depth -= step.function == "end"
        found.append(depth)
        depth += step.function == "loop"
    return found


class Rows:
    """Writes the loops of an expression.

    Args:
        typed: The expression.
        arguments: The form in which it gets its arguments.
        layout: The layouts of its arrays.
        results: How many of these are results.

    Attributes:
        plain: The loads whose index along one axis is that along the row, and a sum: the axis, and the sum.
    """

    def __init__(
        self, typed: TypedExpression, arguments: Sequence[Argument], layout: RowLayout, results: int
    ) -> None:
        self._typed, self._layout, self._results = typed, layout, results
        self._last = layout.axes - 1
        self._loaded = [number for number, _ in typed.loads]
        # The extents of each array that is loaded from begin here.
        self._extents, self._axes = list[int](), 0
        for _, count in typed.loads:
            self._extents.append(self._axes)
            self._axes += count
        self._taken: list[str] = []
        self._is_element: list[bool] = []
        self._dtypes = list(typed.dtypes[:results])
        self._scalars: list[str] = []
        for number, argument in enumerate(arguments):
            array = len(self._dtypes)
            is_element = argument.is_array and number in typed.elements
            if not argument.is_array:
                place = f"at_scalar(a.scalars[{len(self._scalars)}])"
                register = source.register_of(argument.dtype)
                self._taken.append(f"s{len(self._scalars)}")
                self._scalars.append(
                    f"const {register} s{len(self._scalars)} = {source.load(argument.dtype, place)};"
                )
            elif is_element:
                self._dtypes.append(argument.dtype)
                self._taken.append(source.load(argument.dtype, self._place(array)))
            else:
                self._taken.append("")
            self._is_element.append(is_element and layout.access[array] != "same")
        self._depths = depths_of(typed.steps)
        self._varies = list[bool]()
        for number, step in enumerate(typed.steps):
            given = [self._varies[one] for one in step.steps if one < number]
            self._varies.append(self._begins_row(step) or any(given))
        # Whether a value is another one along the row; and whether it stands in the loop of the row.
        self._differs = self._find_differing()
        self._vary_loops()
        # The breaks of each loop.
        self._breaks: dict[int, list[int]] = {}
        for number, step in enumerate(typed.steps):
            if step.function == "break":
                self._breaks.setdefault(step.steps[0], []).append(number)
        self.plain: dict[int, tuple[int, str]] = {}
        self._conditions: list[Condition] = []
        for number, step in enumerate(typed.steps):
            if step.function == "load":
                self._find_plain(number, step)

    def _find_differing(self) -> list[bool]:
        """Tell of each step whether it has another value along the row; all elements count the same loops."""
        found, before = list(self._varies), list[bool]()
        while found != before:
            before = list(found)
            for number, step in enumerate(self._typed.steps):
                given = step.steps[:1] if step.function == "loop" else step.steps
                found[number] = self._begins_row(step) or any(found[one] for one in given)
                if step.function in ("break", "end"):
                    values = step.steps[2 if step.function == "break" else 1 :]
                    carried = self._typed.steps[step.steps[0]].steps[2:]
                    for one, value in zip(carried, values, strict=True):
                        found[one] |= found[value]
        return found

    def _vary_loops(self) -> None:
        """Have all steps of a loop vary along the row where one does: a loop is not divided."""
        steps = self._typed.steps
        for number, step in enumerate(steps):
            if step.function != "loop" or self._depths[number]:
                continue
            end = int(step.value.real)
            whole = [*step.steps[2:], *range(number, end + 1)]
            if any(self._varies[one] for one in (*whole, *step.steps)):
                for one in (*whole, *(n for n in range(end, len(steps)) if steps[n].steps[1:] == (end,))):
                    self._varies[one] = True
        for number in range(len(steps)):
            # A step that depends on a loop comes behind it.
            self._varies[number] |= any(self._varies[one] for one in steps[number].steps if one < number)

    def _is_ahead(self, number: int) -> bool:
        """Tell whether a value is there before the loop of a row."""
        return not self._varies[number] and not self._depths[number]

    def _place(self, array: int) -> str:
        size = self._dtypes[array].itemsize
        steps = {"same": "0", "dense": f"k * {size}", "strided": f"k * step{array}"}
        return f"p{array} + {steps[self._layout.access[array]]}"

    def _axis(self, step: Step) -> int:
        return int(step.value.real) % self._layout.axes

    def _begins_row(self, step: Step) -> bool:
        """Tell whether a step makes what is another one for each element of a row."""
        if step.function == "argument":
            return self._is_element[int(step.value.real)]
        return step.function == "index" and self._axis(step) == self._last

    def _find_plain(self, number: int, step: Step) -> None:
        varying = [axis for axis, index in enumerate(step.steps) if self._differs[index]]
        found = self._shift_of(step.steps[varying[0]]) if len(varying) == 1 else None
        if found is not None:
            shift, conditions = found
            extent = self._extents[self._loaded.index(int(step.value.real))] + varying[0]
            self.plain[number] = varying[0], shift
            self._conditions += [*conditions, (shift, "0", f"e{extent} - 1")]

    def _shift_of(self, number: int) -> tuple[str, tuple[Condition, ...]] | None:
        """Return what a value has beside the index along the row, under conditions; None if it is no sum."""
        step = self._typed.steps[number]
        if step.function == "index":
            return "(i64)0", ()
        most = _WHOLE.get(step.dtype)
        if most is None or not step.steps:
            return None
        first, *others = step.steps
        if step.function == "add" and not self._varies[first]:
            first, others = others[0], [first]
        found = self._shift_of(first) if self._varies[first] else None
        if found is None or not all(map(self._is_ahead, others)):
            return None
        shift, conditions = found
        if step.function == "cast" and self._typed.steps[first].dtype in _WHOLE:
            pass
        elif step.function in _SHIFTS:
            shift = f"{_SHIFTS[step.function]}({shift}, (i64)t{others[0]})"
        elif step.function in _BOUNDS:
            bound = f"(i64)t{others[0]}"
            low = {"remainder": "0", "maximum": bound}.get(step.function)
            high = {"remainder": f"{bound} - 1", "minimum": bound}.get(step.function)
            conditions += ((shift, low, high),)
        else:
            return None
        if most:
            conditions += ((shift, f"-{most}", most),)
        return shift, conditions

    def structure(self) -> str:
        """C++ of what a text begins with, and of the structure of arguments."""
        arrays, axes = max(len(self._dtypes), 1), self._layout.axes
        return f"""{head_of(self._typed)}
enum {{ AXES = {axes}, ARRAYS = {len(self._dtypes)} }};
struct Arguments {{
    char *p[{arrays}];
    char *q[{max(len(self._loaded), 1)}];
    Scalar scalars[{max(len(self._scalars), 1)}];
    i64 shape[{axes}], strides[{arrays}][{axes}], extents[{max(2 * self._axes, 1)}], pass;
}};"""

    def _locals(self) -> Iterator[str]:
        for array, access in enumerate(self._layout.access):
            kind = "char" if array < self._results else "const char"
            yield f"{kind} *const p{array} = p[{array}];"
            if access == "strided":
                yield f"const i64 step{array} = a.strides[{array}][{self._last}];"
        yield from (f"char *const q{array} = a.q[{array}];" for array in range(len(self._loaded)))
        yield from (
            f"const i64 e{number} = a.extents[{2 * number}], f{number} = a.extents[{2 * number + 1}];"
            for number in range(self._axes)
        )
        yield from (f"const i64 x{axis} = x[{axis}];" for axis in range(self._last))
        yield from self._scalars

    def _needed(self, *, is_inside: bool) -> set[int]:
        """Return the steps that results depend on."""
        needed, left = set[int](), list(self._typed.outputs)
        while left:
            number = left.pop()
            if number in needed:
                continue
            needed.add(number)
            left += self._breaks.get(number, ())
            plain = self.plain.get(number) if is_inside else None
            left += [
                one for axis, one in enumerate(self._typed.steps[number].steps)
                if plain is None or axis != plain[0]
            ]  # fmt: skip
            # The sum beside the index has steps of its own.
            left += [int(one) for one in _STEPS.findall(plain[1])] if plain is not None else []
        return needed

    def statements(self, needed: set[int], *, is_inside: bool) -> tuple[list[str], list[str]]:
        """C++ of steps: what stands before the loop of a row, and what stands in it."""
        before, inside = list[str](), list[str]()
        for number, step in enumerate(self._typed.steps):
            if number not in needed:
                continue
            where = inside if self._varies[number] else before
            if of_loop := source.loop_lines(number, self._typed.steps):
                where += of_loop
                continue
            if step.function == "index":
                value = "k" if self._axis(step) == self._last else f"x{self._axis(step)}"
            elif step.function == "load":
                value = self._load(number, step, before, where, is_inside=is_inside)
            else:
                value = source.value_of(step, self._taken, self._typed.steps)
            where.append(f"const {source.register_of(step.dtype)} t{number} = {value};")
        return before, inside

    def _load(self, number: int, step: Step, before: list[str], where: list[str], *, is_inside: bool) -> str:
        """C++ of a load; what its place has before the loop goes there, and checks where they belong."""
        array = self._loaded.index(int(step.value.real))
        same, parts = [f"q{array}"], list[str]()
        for axis, index in enumerate(step.steps):
            extent = self._extents[array] + axis
            if is_inside and number in self.plain and self.plain[number][0] == axis:
                size = f"{step.dtype.itemsize}" if self._layout.dense[array][axis] else f"f{extent}"
                parts.append(f"k * {size}")
                same.append(f"{self.plain[number][1]} * {size}")
                continue
            is_ahead = self._is_ahead(index)
            (same if is_ahead else parts).append(f"reached(t{index}, e{extent}, f{extent})")
            if self._typed.checked and self._typed.steps[index].function != "index":
                # A loop of no iterations checks nothing.
                is_first = is_ahead and not self._depths[number]
                (before if is_first else where).append(f"bad |= is_outside(t{index}, e{extent});")
        before.append(f"const char *const r{number} = {' + '.join(same)};")
        return source.load(step.dtype, " + ".join((f"r{number}", *parts)))

    def loop(
        self,
        name: str,
        *,
        is_inside: bool = False,
        is_apart: bool = False,
        in_order: bool = False,
        stores: Sequence[str] | None = None,
    ) -> str:
        """C++ of a function for a row.

        Args:
            name: Its name.
            is_inside: Whether it is for elements where loads are plain.
            is_apart: Whether it is for the few elements below `low`, and from `high` on.
            in_order: Whether elements may depend on those before.
            stores: What is done with the results; by default they are stored.
        """
        before, inside = self.statements(self._needed(is_inside=is_inside), is_inside=is_inside)
        stores = list(self._stored()) if stores is None else stores
        start, bounds = "static", "i64 first, i64 end"
        if is_apart:
            # No vectors are made of it, which takes a compiler longer than all else.
            start, bounds = "__attribute__((noinline)) static", "i64 first, i64 low, i64 high, i64 end"
        following = "k = k + 1 == low ? high : k + 1" if is_apart else "k++"
        begin = "first == low ? high : first" if is_apart else "first"
        return f"""{start} i64 {name}(const Arguments &a, char *const *p, const i64 *x, {bounds})
{{
    i64 bad = 0;
{source.indented(chr(10).join((*self._locals(), *before)), 4)}
{"" if is_apart or in_order else "#pragma GCC ivdep"}
    for (i64 k = {begin}; k < end; {following}) {{
{source.indented(chr(10).join((*inside, *stores)), 8)}
    }}
    return bad;
}}"""

    def _stored(self) -> Iterator[str]:
        for result, number in enumerate(self._typed.outputs[: self._results]):
            yield f"{source.element_of(self._dtypes[result])}::store({self._place(result)}, t{number});"

    def whole(self, anywhere: str) -> str:
        """C++ of the function of a row of `n` elements, which finds where its loads are plain.

        Args:
            anywhere: The function for elements anywhere.
        """
        start = "static i64 row(const Arguments &a, char *const *p, const i64 *x, i64 first, i64 end)\n{\n"
        if not self.plain:
            return f"{start}    return ({anywhere})(a, p, x, first, end);\n}}"
        before, _ = self.statements(set(range(len(self._typed.steps))), is_inside=False)
        bounds = dict.fromkeys(line for condition in self._conditions for line in _bounds(*condition))
        return f"""{start}    i64 bad = 0;
{source.indented(chr(10).join((*self._locals(), *before)), 4)}
    i64 low = first, high = end;
{source.indented(chr(10).join(bounds), 4)}
    if (low >= high)
        return {anywhere}(a, p, x, first, end, end, end);
    bad = row_inside(a, p, x, low, high);
    return low - first + end - high ? bad | {anywhere}(a, p, x, first, low, high, end) : bad;
}}"""


def _bounds(shift: str, low: str | None, high: str | None) -> Iterator[str]:
    if low is not None:
        yield f"low = most(low, f_subtract((i64)({low}), {shift}));"
    if high is not None:
        yield f"high = least(high, f_subtract(f_add((i64)({high}), (i64)1), {shift}));"


# Rows of a range of elements. A row may begin before it, or end behind it.
_RUN = """
extern "C" __attribute__((visibility("default"))) i64 run(const Arguments *whole, i64 first, i64 end)
{
    const Arguments a = *whole;
    i64 x[AXES], rest = first, bad = 0;
    for (int axis = AXES - 1; axis >= 0; axis--) {
        x[axis] = rest % a.shape[axis];
        rest /= a.shape[axis];
    }
    i64 start = x[AXES - 1];
    x[AXES - 1] = 0;
    while (first < end) {
        const i64 n = least(end - first, a.shape[AXES - 1] - start);
        char *p[ARRAYS + 1];
        for (int array = 0; array < ARRAYS; array++) {
            p[array] = a.p[array];
            for (int axis = 0; axis < AXES - 1; axis++)
                p[array] += x[axis] * a.strides[array][axis];
        }
        bad |= row(a, p, x, start, start + n);
        first += n;
        start = 0;
        for (int axis = AXES - 2; axis >= 0; axis--) {
            if (++x[axis] < a.shape[axis])
                break;
            x[axis] = 0;
        }
    }
    return bad;
}
"""
