"""Reductions, and expressions of rows, compiled: in NumPy's order, so that sums have its bits (D188)."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import attrs

from ...base.contract.dtypes import DType
from ...base.contract.ops import ReductionSpec, RowsSpec
from ...base.expressions import (
    COUNT,
    SCALAR_BYTES,
    Argument,
    SpecializedReduction,
    SpecializedRows,
    Step,
    TypedExpression,
    TypedReduction,
    found,
    needed_steps,
    reduced_groups,
)
from ...base.expressions import _rows_source as rows_source
from ...base.expressions import _source as source
from ._compiler import compiler, counts, mode
from ._plans import LINE, Call, Plan, are_exact, are_vectors, find_plan, is_aligned
from ._text import called_by, head_of

# Whether groups of neighbouring axes are reduced.
_PATTERNS = ([True], [False, True], [True, False], [False, True, False])
# These are made in NumPy's order. Of zeros with different signs NumPy may find either as the least.
_ORDERED = ("sum", "mean", "prod")


def reduce(spec: ReductionSpec, call: Call) -> bool:
    """Reduce arrays by compiled code; False where NumPy is to do it."""
    return _run(spec, call, _reduction_plan)


def rows(spec: RowsSpec, call: Call) -> bool:
    """Compute rows by compiled code; False where NumPy is to do it."""
    return _run(spec, call, _rows_plan)


def _run(spec: ReductionSpec | RowsSpec, call: Call, make: Callable[[Any], Plan]) -> bool:
    plan = find_plan(spec, make)
    entry = plan.find()
    if entry is not None:
        plan.run(entry, plan.data([call.at(each) for each in (spec.out, *spec.arrays)], spec.scalars))
    counts.add(entry is not None)
    return entry is not None


@attrs.frozen
class Layout:
    """Elements that are reduced, between those that are kept.

    Attributes:
        extents: How many rows are kept, how many elements are reduced, and how many are kept in each.
        strides: For each array the bytes from one to the next of each. A result of the arrays' shape is last.
    """

    extents: tuple[int, int, int]
    strides: tuple[tuple[int, int, int], ...]

    @property
    def is_row(self) -> bool:
        """Whether what is reduced lies side by side."""
        return self.extents[2] == 1


def _layout(spec: ReductionSpec | RowsSpec, *, is_whole: bool) -> Layout | None:
    """Find the layout; None where it is not so simple, or where NumPy goes another way."""
    arrays, shape = (*spec.arrays, *([spec.out] if is_whole else [])), spec.arrays[0].shape
    _, order = reduced_groups(shape, spec.axes, [array.strides for array in spec.arrays])
    axes = [axis for axis in order if shape[axis] > 1]
    kept = [axis for axis in axes if axis not in spec.axes]
    groups = [(is_reduced, list(group)) for is_reduced, group in groupby(axes, spec.axes.__contains__)]
    kinds = [is_reduced for is_reduced, _ in groups]
    if kinds not in _PATTERNS or kept != sorted(kept) or 0 in shape:
        return None
    if not (is_whole or spec.out.is_contiguous) or not all(map(is_aligned, (*arrays, spec.out))):
        return None
    neighbours = [pair for _, group in groups for pair in pairwise(group)]
    for array in arrays:
        steps = [array.strides[axis] for axis in axes if array.strides[axis]]
        if steps != sorted(map(abs, steps), reverse=True):
            return None
        if any(array.strides[a] != array.strides[b] * shape[b] for a, b in neighbours):
            return None
    at = kinds.index(True)
    parts = [groups[k][1] if 0 <= k < len(groups) else [] for k in (at - 1, at, at + 1)]
    extents = [math.prod(shape[axis] for axis in part) for part in parts]
    strides = [tuple(array.strides[part[-1]] if part else 0 for part in parts) for array in arrays]
    return Layout(tuple(extents), tuple(strides))  # type: ignore[arg-type]  # three of each


def _plan(
    spec: ReductionSpec | RowsSpec,
    arguments: Sequence[Argument],
    parts: Sequence[TypedExpression],
    stages: Sequence[TypedReduction],
    text: Callable[[Layout], str],
    *,
    is_whole: bool,
) -> Plan:
    chosen, layout = mode(), _layout(spec, is_whole=is_whole)
    is_exact = are_exact(parts)
    if (
        chosen == "never"
        or layout is None
        or not (is_exact or are_vectors(parts, chosen))
        or not all(_is_simple(stage, is_exact=is_exact) for stage in stages)
        or compiler() is None
    ):
        return Plan()
    lead, count, tail = layout.extents
    scalars = sum(not argument.is_array for argument in arguments)
    numbers = [*layout.extents, *(step for steps in layout.strides for step in steps)]
    # The text depends on what is there, and what lies side by side.
    sizes = [array.dtype.itemsize for array in (*spec.arrays, spec.out)]
    kinds = [tuple(step if step in (0, size) else -1 for step in steps)
             for steps, size in zip(layout.strides, sizes, strict=False)]  # fmt: skip
    general = Layout(tuple(min(each, 2) for each in layout.extents), tuple(kinds))  # type: ignore[arg-type]
    return Plan(
        text=partial(text, general),
        is_exact=is_exact,
        count=lead * LINE if layout.is_row else lead * tail,
        weight=lead * count * tail * sum(step.dtype.itemsize for part in parts for step in part.steps),
        form=struct.Struct(f"={1 + len(spec.arrays)}Q{SCALAR_BYTES * max(scalars, 1)}s"),
        rest=struct.pack(f"={len(numbers)}q", *numbers),
    )


def _is_simple(stage: TypedReduction, *, is_exact: bool) -> bool:
    name, dtype = stage.reduction.name, stage.accumulator
    if dtype.kind == "complex" or stage.reduction.is_index or stage.combine is not None:
        return False
    return name in _ORDERED or not is_exact or dtype.kind in ("int", "uint")


def _reduction_plan(spec: ReductionSpec) -> Plan:
    decoded = SpecializedReduction.decode(spec.reduction)
    typed = decoded.typed
    step = typed.map.steps[typed.map.outputs[0]]
    if step.function == "argument" and step.dtype is typed.accumulator:
        # NumPy has nothing to make before.
        return Plan()
    parts = [typed.map, *([] if typed.post is None else [typed.post])]
    return _plan(
        spec, decoded.arguments, parts, [typed], partial(reduction_text, spec.reduction), is_whole=False
    )


def _rows_plan(spec: RowsSpec) -> Plan:
    decoded = SpecializedRows.decode(spec.rows)
    posts = [stage.post for stage in decoded.typed.stages if stage.post is not None]
    parts = [*(part for part, _ in decoded.typed.parts), *posts]
    plan = _plan(
        spec,
        decoded.arguments,
        parts,
        decoded.typed.stages,
        partial(rows_text, spec.rows),
        is_whole=decoded.is_whole,
    )
    return plan if decoded.usual is None else Plan()


class _Names(rows_source.Names):
    """C++ of what expressions read: fields of `loaded`, which is of a row, or of a row of columns."""

    def __init__(
        self, inputs: Sequence[str], arguments: Sequence[Argument], layout: Layout, stages: int
    ) -> None:
        super().__init__(inputs, arguments, stages)
        self._axis = 1 if layout.is_row else 2
        self.named |= {name: f"loaded.c{n}" for n, name in enumerate(self.scalars)} | {COUNT: "loaded.n"}
        for n, (name, dtype) in enumerate(self.arrays.items()):
            self.named[name] = source.load(dtype, f"loaded.p{n} + {self.step(layout, n, dtype)}")

    def step(self, layout: Layout, number: int, dtype: DType) -> str:
        step = layout.strides[number][self._axis]
        return f"i * {dtype.itemsize if step == dtype.itemsize else f'loaded.s{number}'}" if step else "0"

    def structures(self, stages: Sequence[TypedReduction], layout: Layout) -> str:
        """C++ of the arguments, and of what a row has."""
        many = len(layout.strides)
        fields = [f"const char *p{n};" for n in range(len(self.arrays))]
        fields += [f"i64 s{n};" for n in range(many)]
        fields += [f"{source.register_of(dtype)} c{n};" for n, dtype in enumerate(self.scalars.values())]
        steps = [
            f"lead * a.strides[{n}][0] + k * a.strides[{n}][1] + tail * a.strides[{n}][2]"
            for n in range(many)
        ]
        made = [f"a.in[{n}] + {steps[n]}" for n in range(len(self.arrays))]
        made += [f"a.strides[{n}][{self._axis}]" for n in range(many)]
        made += [
            source.load(dtype, f"at_scalar(a.scalars[{n}])") for n, dtype in enumerate(self.scalars.values())
        ]
        results = [f"{source.register_of(stage.dtype)} {found(n)};" for n, stage in enumerate(stages)]
        return f"""typedef i64 Index;
struct Arguments {{
    char *out;
    const char *in[{len(self.arrays)}];
    Scalar scalars[{max(len(self.scalars), 1)}];
    i64 lead, count, tail, strides[{many}][3], pass;
}};
struct Row {{ {" ".join(results)} }};
struct Loaded {{ i64 n; {" ".join(fields)} }};
FUNCTION Loaded loaded_at(const Arguments &a, i64 lead, i64 k, i64 tail)
{{
    return {{a.count, {", ".join(made)}}};
}}"""


def _found(number: int, stage: TypedReduction, at: str) -> str:
    """C++ of what a reduction of a row finds."""
    is_ahead = stage.reduction.name == "prod" and stage.accumulator.kind == "float"
    way = "ahead" if is_ahead else "halves"
    made = f"{way}<Stage{number}>(0, a.count, {at})"
    return f"Stage{number}::result(a, Stage{number}::combine(Stage{number}::nothing(), {made}))"


@functools.cache
def _halves() -> str:
    return Path(__file__).with_name("reductions.h").read_text(encoding="utf-8")


@functools.lru_cache(256)
def reduction_text(reduction: str, layout: Layout) -> str:
    """Write the source of a reduction.

    Args:
        reduction: A text of `SpecializedReduction.encode`.
        layout: Layouts of its arrays; of the extents only those count that are 1.
    """
    decoded = SpecializedReduction.decode(reduction)
    typed = decoded.typed
    names = _Names(typed.reduction.map.inputs, decoded.arguments, layout, 0)
    store = f"{source.element_of(typed.dtype)}::store(a.out + number * {typed.dtype.itemsize}, {{}});"
    if layout.is_row:
        at = "[=](i64 i) { return Stage0::mapped(*whole, Row(), loaded, i); }"
        loop = _ROWS.replace("ROW", store.format(_found(0, typed, at)))
    else:
        keep = f"const i64 number = first + i;\n{store.format('Stage0::result(a, made[i])')}"
        loop = _COLUMNS.replace("PASSES", _pass(0, "Row()", keep))
    structures = names.structures([], layout)
    return "\n".join(
        (head_of(typed.map), structures, rows_source.stage_text(0, typed, names), _halves(), loop)
    )


@functools.lru_cache(256)
def rows_text(rows: str, layout: Layout) -> str:
    """Write the source of an expression of rows; see `reduction_text`."""
    decoded = SpecializedRows.decode(rows)
    typed = decoded.typed
    names = _Names(decoded.rows.inputs, decoded.arguments, layout, len(typed.stages))
    stages = [rows_source.stage_text(number, stage, names) for number, stage in enumerate(typed.stages)]
    last, texts = typed.last, names.texts(decoded.rows.last.inputs)
    begin = head_of(*(part for part, _ in typed.parts)), names.structures(typed.stages, layout), *stages
    if not layout.is_row:
        return "\n".join((*begin, _columns(decoded, names, layout)))
    passes = list[str]()
    for number, stage in enumerate(typed.stages):
        at = f"[=](i64 i) {{ return Stage{number}::mapped(*whole, row, loaded, i); }}"
        # A reduction behind it may read the arrays again, where the result may lie: only the last one keeps.
        keeps = stage is typed.stages[-1] and layout.strides[-1][1] == decoded.result.itemsize
        kept = _kept(decoded) if keeps else None
        if kept is not None:
            # To compute it anew would take as long again: it is kept where the result will be.
            there, steps = f"out + i * {decoded.result.itemsize}", list(last.steps)
            steps[kept] = Step("argument", decoded.result, (), len(texts))
            last = attrs.evolve(last, steps=tuple(steps))
            texts.append(source.load(decoded.result, there))
            keep = (
                f"{source.element_of(decoded.result)}::store({there}, {at.replace('[=]', '[&]')}(i).value);"
            )
            passes.append(f"#pragma GCC ivdep\nfor (i64 i = 0; i < n; i++)\n    {keep}")
            at = f"[=](i64 i) {{ return Stage{number}::element({source.load(decoded.result, there)}, i); }}"
        passes.append(f"row.{found(number)} = {_found(number, stage, at)};")
    statements, (result,) = source.body(last, texts)
    lines, ahead, varies = statements.splitlines(), list[str](), list[bool]()
    for step in last.steps:
        # A step that is the same along a row stands before its loop.
        is_read = step.function == "argument" and "::load(" in texts[int(step.value.real)]
        varies.append(is_read or any(varies[number] for number in step.steps))
    if len(lines) == len(varies):
        ahead = [line for line, is_inside in zip(lines, varies, strict=True) if not is_inside]
        lines = [line for line, is_inside in zip(lines, varies, strict=True) if is_inside]
    many = names.step(layout, len(layout.strides) - 1, decoded.result) if decoded.is_whole else "0"
    passes.append(f"""{chr(10).join(ahead)}
#pragma GCC ivdep
for (i64 i = 0; i < {"n" if decoded.is_whole else "1"}; i++) {{
{source.indented(chr(10).join(lines), 4)}
    {source.element_of(decoded.result)}::store(out + {many}, {result});
}}""")
    out = f"a.strides[{len(layout.strides) - 1}][0]" if decoded.is_whole else f"{decoded.result.itemsize}"
    first = f"Row row;\nconst i64 n = a.count;\nchar *const out = a.out + number * {out};"
    return "\n".join((*begin, _halves(), _ROWS.replace("ROW", "\n".join((first, *passes)))))


def _pass(number: int, row: str, keep: str) -> str:
    """Write how a reduction passes over columns; `keep` takes what is ``made`` of column ``i``."""
    return _REDUCE.replace("STAGE", f"Stage{number}").replace("ROW", row).replace("KEEP", keep)


def _columns(decoded: SpecializedRows, names: _Names, layout: Layout) -> str:
    """Write the function of rows that lie across the memory: several of them at a time."""
    last, result = decoded.typed.last, decoded.result
    passes = [
        _pass(number, "rows[i]", f"rows[i].{found(number)} = Stage{number}::result(a, made[i]);")
        for number in range(len(decoded.typed.stages))
    ]
    statements, (value,) = source.body(last, names.texts(decoded.rows.last.inputs))
    place, at = f"a.out + (first + i) * {result.itemsize}", len(layout.strides) - 1
    if decoded.is_whole:
        steps = f"lead * a.strides[{at}][0] + k * a.strides[{at}][1] + tail * a.strides[{at}][2]"
        place = f"a.out + {steps} + {names.step(layout, at, result)}"
    passes.append(f"""for (i64 k = 0; k < {"a.count" if decoded.is_whole else "1"}; k++) {{
    const Loaded loaded = loaded_at(a, lead, k, tail);
#pragma GCC ivdep
    for (i64 i = 0; i < m; i++) {{
        const Row &row = rows[i];
{source.indented(statements, 8)}
        {source.element_of(result)}::store({place}, {value});
    }}
}}""")
    return _COLUMNS.replace("PASSES", "\n".join(("Row rows[WIDTH];", *passes)))


def _kept(decoded: SpecializedRows) -> int | None:
    """Return the step of the last expression that the last reduction reads, too; None if it saves nothing."""
    typed, result = decoded.typed, decoded.result
    program, last, names = typed.program, typed.last, decoded.rows.last.inputs
    reduction = max(number for number, step in enumerate(program.steps) if step.is_reduction)
    operands = program.passes[None].operands[reduction]
    if len(operands) != 1 or operands[0] not in typed.numbers or not called_by(typed.stages[-1].map):
        return None
    at = typed.numbers.index(operands[0])
    casts = [program.steps[number].function == "cast" for number in program.passes[reduction].numbers]
    if last.steps[at].dtype is not result or result.itemsize < 4 or not all(casts):
        return None
    # The result may lie where the arrays do: then they are not to be read again.
    arrays = {
        name for name, each in zip(decoded.rows.inputs, decoded.arguments, strict=True) if each.is_array
    }
    left = [last.steps[number] for number in needed_steps(last.steps, last.outputs, (at,))]
    is_read = any(step.function == "argument" and names[int(step.value.real)] in arrays for step in left)
    return None if is_read else at


_ROWS = """
extern "C" __attribute__((visibility("default"))) i64 run(const Arguments *whole, i64 first, i64 end)
{
    const Arguments a = *whole;
    for (i64 number = first / 64; number < end / 64; number++) {
        const Loaded loaded = loaded_at(a, number, 0, 0);
        ROW
    }
    return 0;
}
"""

_COLUMNS = """
enum { WIDTH = 2048 };
extern "C" __attribute__((visibility("default"))) i64 run(const Arguments *whole, i64 first, i64 end)
{
    const Arguments a = *whole;
    while (first < end) {
        const i64 lead = first / a.tail, tail = first % a.tail, left = least(end - first, a.tail - tail);
        const i64 m = least(left, WIDTH);
        PASSES
        first += m;
    }
    return 0;
}
"""

# Four rows at a time, so that partial results are read and written less often.
_REDUCE = """{
    STAGE::Partial made[WIDTH];
    for (i64 i = 0; i < m; i++)
        made[i] = STAGE::nothing();
    i64 k = 0;
    for (; k + 4 <= a.count; k += 4) {
        const Loaded r0 = loaded_at(a, lead, k, tail), r1 = loaded_at(a, lead, k + 1, tail);
        const Loaded r2 = loaded_at(a, lead, k + 2, tail), r3 = loaded_at(a, lead, k + 3, tail);
        for (i64 i = 0; i < m; i++) {
            STAGE::Partial one = STAGE::combine(made[i], STAGE::mapped(a, ROW, r0, i));
            one = STAGE::combine(one, STAGE::mapped(a, ROW, r1, i));
            one = STAGE::combine(one, STAGE::mapped(a, ROW, r2, i));
            made[i] = STAGE::combine(one, STAGE::mapped(a, ROW, r3, i));
        }
    }
    for (; k < a.count; k++) {
        const Loaded r0 = loaded_at(a, lead, k, tail);
        for (i64 i = 0; i < m; i++)
            made[i] = STAGE::combine(made[i], STAGE::mapped(a, ROW, r0, i));
    }
    for (i64 i = 0; i < m; i++) {
        KEEP
    }
}"""
