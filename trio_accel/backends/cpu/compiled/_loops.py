"""The loops of a program on a processor: one nest for elements, scatters, rows and columns (D186, D188).

The loops run along the axes, from the outermost axis on. No axis is reduced (elements, scatters), or the last
axis is (rows), or the last but one (columns). A step with the same value in a whole loop is computed before
it, because a compiler leaves branches inside, and a reduction is such a step. Sums are in NumPy's order, so
that they have its bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from ...base.expressions import TypedStep, decode_program, needed_steps
from ...base.expressions import _source as source
from ...base.expressions._pieces import REDUCING
from ._functions import VECTOR
from ._text import COLUMN, ELEMENT, LoopLayout, Statements

__all__ = ["text_of"]


@functools.lru_cache(256)
def text_of(program: str, layout: LoopLayout) -> str:
    """Write the source of a program.

    Args:
        program: The program, as `encode_program` writes it.
        layout: The layouts of its arrays.
    """
    decoded = decode_program(program)
    return _Loops(decoded.program, decoded.arguments, layout).text()


class _Loops(Statements):
    """Writes the loops of a program; see `Statements`."""

    def text(self) -> str:
        """Write the source."""
        width = "2048" if self.layout.reduced == 2 else "1ll << 40"
        parts = [self.structure(), f"enum : i64 {{ WIDTH = {width} }};"]
        if self.layout.reduced == 1:
            parts.append(Path(__file__).with_name("reductions.h").read_text(encoding="utf-8"))
        parts += [_combination(number, self.steps[number]) for number in self.reductions]
        if self.layout.reduced == 2:
            parts.append(self._columns())
        elif self.layout.reduced or not (self.plain or self.stores):
            parts.append(self._loop("row"))
        elif self.stores:
            # All indices are checked before anything is stored.
            parts += [self._loop("row_checked", is_checking=True), self._loop("row_stored")]
            chosen = "return (a.pass ? row_stored : row_checked)(a, p, x, first, end);"
            parts.append(_function("row", [chosen]))
        else:
            parts += [self._loop("row_anywhere", is_apart=True), self._loop("row_inside", is_inside=True)]
            parts.append(self._parted())
        return "\n".join((*parts, _RUN))

    def _prologue(self, *, is_inside: bool = False) -> list[str]:
        """Return C++ before the loop of a row: steps that do not change along it, and reductions."""
        operands = [operand for number in self.reductions for operand in self.steps[number].steps]
        prologue, level = list[str](), COLUMN if self.layout.reduced == 2 else ELEMENT
        for number in self.needed([*self.outputs, *operands], is_inside=is_inside):
            if self.levels[number] >= level:
                continue
            if number in self.reductions:
                prologue += self._reduced(number)
            else:
                self.statement(number, prologue, prologue)
        return prologue

    def _loop(
        self, name: str, *, is_inside: bool = False, is_apart: bool = False, is_checking: bool = False
    ) -> str:
        """C++ of a function for a row.

        Args:
            name: Its name.
            is_inside: Whether it is for elements where loads are plain.
            is_apart: Whether it is for the few elements below `low`, and from `high` on.
            is_checking: Whether it checks the indices of stores, and stores nothing.
        """
        prologue, inside = self._prologue(is_inside=is_inside), list[str]()
        for number in self.needed(self.outputs, is_inside=is_inside):
            if self.levels[number] == ELEMENT:
                self.statement(number, prologue, inside, is_inside=is_inside, is_checking=is_checking)
        # Elements of a store may depend on the elements before.
        ivdep = "" if is_apart or self.stores else "#pragma GCC ivdep"
        begin, end, following = "first", "end", "k++"
        if self.layout.reduced:
            begin, end = "0", "1" if self.layout.access[0] == "same" else "count"
        if is_apart:
            begin, following = "first == low ? high : first", "k = k + 1 == low ? high : k + 1"
        return _function(
            name,
            [
                "i64 bad = 0;",
                *self.locals(),
                *prologue,
                ivdep,
                f"for (i64 k = {begin}; k < {end}; {following}) {{",
                source.indented("\n".join([*inside, *([] if is_checking else self._results())]), 4),
                "}",
                "return bad;",
            ],
            is_apart=is_apart,
        )

    def _results(self) -> list[str]:
        return [
            f"{source.element_of(self.dtypes[result])}::store({self.address_of(result)}, t{number});"
            for result, number in enumerate(self.program.outputs)
        ]

    def _parted(self) -> str:
        """Return C++ for a row's function that finds where its loads are plain."""
        bounds = dict.fromkeys(line for condition in self.conditions for line in _bounds(*condition))
        return _function(
            "row",
            [
                "i64 bad = 0;",
                *self.locals(),
                *self._prologue(),
                "i64 low = first, high = end;",
                *bounds,
                "if (low >= high)",
                "    return row_anywhere(a, p, x, first, end, end, end);",
                "bad = row_inside(a, p, x, low, high);",
                "return low - first + end - high ? bad | row_anywhere(a, p, x, first, low, high, end) : bad;",
            ],
        )

    def _reduced(self, number: int) -> list[str]:
        """Return C++ for a row's reduction."""
        step, lines, mapped = self.steps[number], list[str](), list[str]()
        stored = self._stored_step() if number == self.reductions[-1] else None
        if stored is not None:
            # Computing it again would take as long again, so it is written to the place of the result.
            statements = list[str]()
            self._add([stored], ELEMENT, lines, statements)
            store = f"{source.element_of(self.dtypes[0])}::store({self.address_of(0)}, t{stored});"
            lines += _of_each([*statements, store], "0", "count")
            self.memory[stored] = source.load(self.dtypes[0], self.address_of(0))
        self._add(step.steps, ELEMENT, lines, mapped)
        is_in_order = step.function == "reduce_prod" and step.dtype.kind == "float"
        # The lambda captures by value, because a compiler reads references again for each element.
        return [
            *lines,
            f"const auto m{number} = [=](i64 k) __attribute__((always_inline)) {{",
            source.indented("\n".join(mapped), 4),
            f"    return R{number}::Partial{{t{step.steps[0]}}};",
            "};",
            f"const auto n{number} = {'ahead' if is_in_order else 'halves'}<R{number}>(0, count, m{number});",
            f"const auto t{number} = R{number}::combine({{{_nothing(step)}}}, n{number}).value;",
        ]

    def _add(self, numbers: Sequence[int], level: int, prologue: list[str], inside: list[str]) -> None:
        """Write the steps of at least a level that some steps need."""
        for number in self.needed(numbers):
            if self.levels[number] >= level:
                self.statement(number, prologue, inside)

    def _stored_step(self) -> int | None:
        """Return the result's step that the last reduction also reads; None if keeping it saves nothing."""
        reduction, passes, outputs = self.reductions[-1], self.program.passes, self.program.outputs
        operands = passes[None].operands[reduction]
        if self.layout.access[0] != "dense" or len(outputs) != 1 or len(operands) != 1:
            return None
        (operand,) = operands
        step, result = self.steps[operand], self.dtypes[0]
        is_cast = all(self.steps[number].function == "cast" for number in passes[reduction].numbers)
        is_dear = any(self.steps[number].function in VECTOR for number in self.needed([operand]))
        if not is_cast or not is_dear or step.dtype is not result or result.itemsize < 4:
            return None
        # The result may lie where the arrays do, so no element of these may be read later.
        remaining = needed_steps(self.steps, outputs, (operand,))
        is_read = any(self.is_array(number) for number in remaining) or operand not in self.needed(outputs)
        return None if is_read or self.levels[operand] != ELEMENT else operand

    def _columns(self) -> str:
        """Return C++ for a function on a row of columns, in which each reduction passes over all rows."""
        lines, declarations = self._prologue(), list[str]()
        for number in self.reductions:
            step, inside = self.steps[number], list[str]()
            lines += self._of_columns(step.steps, declarations)
            self._add(step.steps, COLUMN, inside, inside)
            declarations.append(f"R{number}::Partial c{number}s[WIDTH], *const c{number} = c{number}s;")
            self.memory[number] = f"c{number}[k - first].value"
            text = _REDUCE.replace("NUMBER", str(number)).replace("NOTHING", _nothing(step))
            text = text.replace("VALUE", f"t{step.steps[0]}")
            lines.append(text.replace("INSIDE", source.indented("\n".join(inside), 8).strip()))
        rows, inside = "1", list[str]()
        if self.layout.across[0]:
            rows = "count"
            lines += self._of_columns(self.outputs, declarations)
        self._add(self.outputs, COLUMN, inside, inside)
        lines += [f"for (i64 j = 0; j < {rows}; j++)", *_of_each([*inside, *self._results()])]
        return _function("row", [*declarations, *self.locals(), *lines, "return 0;"])

    def _of_columns(self, outputs: Sequence[int], declarations: list[str]) -> list[str]:
        """C++ that computes values of columns before a loop over rows, which reads these from memory."""
        needed = self.needed(outputs)
        elements = [number for number in needed if self.levels[number] == ELEMENT]
        read = {operand for number in elements for operand in self.steps[number].steps}.union(outputs)
        columns = [
            number
            for number in read.difference(self.memory)
            if self.levels[number] == COLUMN and self.steps[number].function != "argument"
        ]
        if not columns:
            return []
        inside = list[str]()
        self._add(columns, COLUMN, inside, inside)
        for number in sorted(columns):
            register = source.register_of(self.steps[number].dtype)
            declarations.append(f"{register} c{number}s[WIDTH], *const c{number} = c{number}s;")
            self.memory[number] = f"c{number}[k - first]"
            inside.append(f"{self.memory[number]} = t{number};")
        return _of_each(inside)


def _of_each(lines: Sequence[str], first: str = "first", end: str = "end") -> list[str]:
    """Return C++ of a loop over independent elements."""
    inside = source.indented("\n".join(lines), 4)
    return ["#pragma GCC ivdep", f"for (i64 k = {first}; k < {end}; k++) {{", inside, "}"]


def _function(name: str, lines: Sequence[str], *, is_apart: bool = False) -> str:
    """Return C++ for a row's function."""
    # The function for a few elements is not vectorized, because vectors take a compiler longest.
    start = "__attribute__((noinline)) static" if is_apart else "static"
    bounds = "i64 first, i64 low, i64 high, i64 end" if is_apart else "i64 first, i64 end"
    body = source.indented("\n".join(lines), 4)
    return f"{start} i64 {name}(const Arguments &a, char *const *p, const i64 *x, {bounds})\n{{\n{body}\n}}"


def _bounds(shift: str, low: str | None, high: str | None) -> list[str]:
    lines = [] if low is None else [f"low = most(low, f_subtract((i64)({low}), {shift}));"]
    if high is not None:
        lines.append(f"high = least(high, f_subtract(f_add((i64)({high}), (i64)1), {shift}));")
    return lines


def _combination(number: int, step: TypedStep) -> str:
    """C++ of how a reduction combines two values; lanes have to be structures, see ``reductions.h``."""
    function = REDUCING[step.function.removeprefix("reduce_")]
    return f"""struct R{number} {{
    struct Partial {{ {source.register_of(step.dtype)} value; }};
    FUNCTION Partial combine(const Partial &a, const Partial &b)
    {{
        return {{f_{function}(a.value, b.value)}};
    }}
}};"""


def _nothing(step: TypedStep) -> str:
    """C++ of the value that changes no other one by a reduction."""
    return source.identity_of_reduction(step.function.removeprefix("reduce_"), step.dtype)


# Four rows at a time, so that partial results are read and written less often.
_REDUCE = """for (i64 k = first; k < end; k++)
    cNUMBER[k - first] = {NOTHING};
{
    const auto mapped = [=](i64 j, i64 k) __attribute__((always_inline)) {
        INSIDE
        return RNUMBER::Partial{VALUE};
    };
    i64 j = 0;
    for (; j + 4 <= count; j += 4)
#pragma GCC ivdep
        for (i64 k = first; k < end; k++) {
            RNUMBER::Partial one = RNUMBER::combine(cNUMBER[k - first], mapped(j, k));
            one = RNUMBER::combine(one, mapped(j + 1, k));
            one = RNUMBER::combine(one, mapped(j + 2, k));
            cNUMBER[k - first] = RNUMBER::combine(one, mapped(j + 3, k));
        }
    for (; j < count; j++)
#pragma GCC ivdep
        for (i64 k = first; k < end; k++)
            cNUMBER[k - first] = RNUMBER::combine(cNUMBER[k - first], mapped(j, k));
}"""

# Rows in a range of elements. A row may begin before the range, or end after it. A reduced row counts as 64
# elements, so that no two threads write to one line of a cache.
_RUN = """
extern "C" __attribute__((visibility("default"))) i64 run(const Arguments *whole, i64 first, i64 end)
{
    enum { OUTER = AXES - (REDUCED ? REDUCED : 1) };
    const Arguments a = *whole;
    const i64 inner = REDUCED == 1 ? 1 : a.shape[AXES - 1];
    if (REDUCED == 1)
        first /= 64, end /= 64;
    i64 x[OUTER + 1], rest = first / inner, start = first % inner, bad = 0;
    for (int axis = OUTER - 1; axis >= 0; axis--) {
        x[axis] = rest % a.shape[axis];
        rest /= a.shape[axis];
    }
    while (first < end) {
        const i64 n = least(least(end - first, inner - start), WIDTH);
        char *p[ARRAYS + 1];
        for (int array = 0; array < ARRAYS; array++) {
            p[array] = a.p[array];
            for (int axis = 0; axis < OUTER; axis++)
                p[array] += x[axis] * a.strides[array][axis];
        }
        bad |= row(a, p, x, start, start + n);
        first += n;
        start += n;
        if (start < inner)
            continue;
        start = 0;
        for (int axis = OUTER - 1; axis >= 0; axis--) {
            if (++x[axis] < a.shape[axis])
                break;
            x[axis] = 0;
        }
    }
    return bad;
}
"""
