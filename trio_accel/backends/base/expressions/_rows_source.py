"""C++ of expressions of rows: threads pass over a row for each reduction, and once more for the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from ..contract.dtypes import DType
from ._reduction import TypedReduction
from ._reduction_source import combination, finished, row_offset, step_in_row
from ._rows import COUNT, SpecializedRows, found
from ._source import (
    Access,
    body,
    cast_of,
    element_of,
    elements_of_thread,
    indented,
    load,
    prelude,
    register_of,
    structure,
)

ROW_THREADS = 256
"""Threads of a block."""


@attrs.frozen
class RowLayouts:
    """Layouts of the arrays of an expression of rows: a kernel is compiled for them.

    Attributes:
        kept: How many axes stay, when contiguous axes are joined.
        reduced: How many axes make a row, likewise.
        access: With one axis of a row: for each array how its elements follow each other there, and last for
            the result if it is of their shape.
        is_wide: Whether numbers of elements take 64 bits.
        group: Threads that make a row.
        is_across: Whether neighbouring threads make neighbouring rows, rather than one row.
    """

    kept: int
    reduced: int
    access: tuple[Access, ...]
    is_wide: bool
    group: int
    is_across: bool


def rows_source(specialized: SpecializedRows, layouts: RowLayouts) -> str:
    """Write the source of the kernel ``rows``.

    Args:
        specialized: The expression, and how it gets its arguments.
        layouts: Layouts of the arrays.
    """
    names = _Names(specialized)
    typed, dtypes = specialized.typed, list(names.arrays.values())
    steps = sum(len(stage.map.steps) for stage in typed.stages) + len(typed.last.steps)
    stages = [_stage(number, stage, names) for number, stage in enumerate(typed.stages)]
    results = [
        f"row.{found(number)} = Stage{number}::result(arguments, in_group<Stage{number}>("
        f"accumulate<Stage{number}>(arguments, bases, row, lane, count)));"
        for number in range(len(stages))
    ]
    registers = [f" {register_of(stage.dtype)} {found(number)};" for number, stage in enumerate(typed.stages)]
    return "\n".join(
        (
            prelude(),
            _arguments(names, layouts),
            f"constexpr int EACH = {elements_of_thread(dtypes, steps)};",
            structure("Loaded", dtypes),
            f"struct Row {{{''.join(registers)} }};",
            _addresses(names, layouts),
            *stages,
            _PASSES,
            _last(specialized, names, layouts),
            _ROWS.replace("RESULTS", indented("\n".join(results)).strip()),
        )
    )


class _Names:
    """C++ of what an expression reads, by its names."""

    def __init__(self, specialized: SpecializedRows) -> None:
        pairs = list(zip(specialized.rows.inputs, specialized.arguments, strict=True))
        self.arrays: Mapping[str, DType] = {name: each.dtype for name, each in pairs if each.is_array}
        self.scalars: Mapping[str, DType] = {name: each.dtype for name, each in pairs if not each.is_array}
        self._texts = {name: f"loaded.x{number}" for number, name in enumerate(self.arrays)}
        for number, (name, dtype) in enumerate(self.scalars.items()):
            self._texts[name] = load(dtype, f"at_scalar(arguments.scalars[{number}])")
        self._texts[COUNT] = "arguments.count"
        for number in range(len(specialized.rows.stages)):
            self._texts[found(number)] = f"row.{found(number)}"

    def texts(self, names: Sequence[str]) -> list[str]:
        return [self._texts[name] for name in names]


def _arguments(names: _Names, layouts: RowLayouts) -> str:
    # C++ has no arrays of no elements.
    kept, reduced, arrays = max(layouts.kept, 1), max(layouts.reduced, 1), len(names.arrays)
    return f"""typedef {"u64" if layouts.is_wide else "u32"} Index;
constexpr int THREADS = {ROW_THREADS};
constexpr bool IS_ACROSS = {"true" if layouts.is_across else "false"};
#ifdef STAND_IN
// Threads of a block run one after another: each makes rows alone.
constexpr int GROUP = 1;
#else
constexpr int GROUP = {layouts.group};
#endif
constexpr int ROWS = THREADS / GROUP;
struct Arguments {{
    i64 outputs, count;
    char *out;
    const char *in[{arrays}];
    Scalar scalars[{max(len(names.scalars), 1)}];
    i64 kept_shape[{kept}], reduced_shape[{reduced}];
    i64 kept_strides[{arrays + 1}][{kept}], reduced_strides[{arrays + 1}][{reduced}];
}};"""


def _addresses(names: _Names, layouts: RowLayouts) -> str:
    """Write where a row begins in each array, and how one of its elements is loaded."""
    begins, loads = list[str](), list[str]()
    for number, dtype in enumerate(names.arrays.values()):
        begins.append(f"arguments.in[{number}]{row_offset(layouts.kept, number)}")
        loads.append(
            load(dtype, f"bases.in{number} + {step_in_row(layouts.reduced, layouts.access, number, dtype)}")
        )
    fields = "".join(f" const char *in{number};" for number in range(len(begins)))
    return f"""struct Bases {{{fields} }};
FUNCTION Bases bases_at(const Arguments &arguments, Index output)
{{
    return {{{", ".join(begins)}}};
}}
FUNCTION Loaded load_at(const Arguments &arguments, const Bases &bases, Index i)
{{
    return {{{", ".join(loads)}}};
}}"""


def _stage(number: int, stage: TypedReduction, names: _Names) -> str:
    """Write a structure of functions: how one reduction combines, and what it finds."""
    statements, (value,) = body(stage.map, names.texts(stage.reduction.map.inputs))
    value = cast_of(value, stage.map.dtypes[0], stage.accumulator)
    last, result = finished(stage)
    return f"""struct Stage{number} {{
{indented(combination(stage), 4)}
    FUNCTION Partial mapped(const Arguments &arguments, const Row &row, const Loaded &loaded, Index i)
    {{
{indented(statements)}
        return element({value}, (i64)i);
    }}
    FUNCTION {register_of(stage.dtype)} result(const Arguments &arguments, const Partial &found)
    {{
{indented(last)}
        return {result};
    }}
}};"""


def _last(specialized: SpecializedRows, names: _Names, layouts: RowLayouts) -> str:
    """Write the function that stores the result of a row."""
    last = specialized.typed.last
    statements, (result,) = body(last, names.texts(specialized.rows.last.inputs))
    at, store = len(names.arrays), f"{element_of(specialized.result)}::store"
    if not specialized.is_whole:
        return f"""FUNCTION void finish(const Arguments &arguments, const Bases &, const Row &row,
    Index output, Index lane, Index)
{{
    if (lane)
        return;
{indented(statements, 4)}
    {store}(arguments.out{row_offset(layouts.kept, at)}, {result});
}}"""
    return f"""FUNCTION void store_at(const Arguments &arguments, const Row &row, const Loaded &loaded,
    char *out, Index i)
{{
{indented(statements, 4)}
    {store}(out + {step_in_row(layouts.reduced, layouts.access, at, specialized.result)}, {result});
}}
FUNCTION void finish(const Arguments &arguments, const Bases &bases, const Row &row,
    Index output, Index lane, Index count)
{{
    char *const out = arguments.out{row_offset(layouts.kept, at)};
    EACH_OF_ROW(store_at(arguments, row, loaded, out, i));
}}"""


# A thread loads several elements before it computes: memory is slow, and wide.
_PASSES = """
#define EACH_OF_ROW(statement)                                                                       \\
    Index next = lane;                                                                               \\
    for (; next + (EACH - 1) * GROUP < count; next += EACH * GROUP) {                                \\
        Loaded several[EACH];                                                                        \\
        _Pragma("unroll") for (int k = 0; k < EACH; k++)                                             \\
            several[k] = load_at(arguments, bases, next + k * GROUP);                                \\
        _Pragma("unroll") for (int k = 0; k < EACH; k++) {                                           \\
            const Loaded &loaded = several[k];                                                       \\
            const Index i = next + k * GROUP;                                                        \\
            statement;                                                                               \\
        }                                                                                            \\
    }                                                                                                \\
    for (Index i = next; i < count; i += GROUP) {                                                    \\
        const Loaded loaded = load_at(arguments, bases, i);                                          \\
        statement;                                                                                   \\
    }

template <class Stage>
FUNCTION typename Stage::Partial accumulate(const Arguments &arguments, const Bases &bases, const Row &row,
    Index lane, Index count)
{
    typename Stage::Partial found = Stage::nothing();
    EACH_OF_ROW(found = Stage::combine(found, Stage::mapped(arguments, row, loaded, i)));
    return found;
}

template <class Stage> FUNCTION typename Stage::Partial in_group(typename Stage::Partial found)
{
#ifndef STAND_IN
    if (GROUP == 1)
        return found;
    __shared__ typename Stage::Partial shared[THREADS];
    const int thread = BLOCK_THREAD, step = IS_ACROSS ? ROWS : 1;
    const int lane = IS_ACROSS ? thread / ROWS : thread % GROUP;
    shared[thread] = found;
    __syncthreads();
#pragma unroll
    for (int half = GROUP / 2; half; half /= 2) {
        if (lane < half)
            shared[thread] = Stage::combine(shared[thread], shared[thread + half * step]);
        __syncthreads();
    }
    found = shared[thread - lane * step];
    __syncthreads();
#endif
    return found;
}
"""

# All threads of a block go round as often, as they wait for each other.
_ROWS = """
KERNEL(rows, Arguments)
{
    const int thread = (int)threadIdx.x;
    const Index lane = IS_ACROSS ? thread / ROWS : thread % GROUP;
    for (i64 first = (i64)blockIdx.x * ROWS; first < arguments.outputs; first += (i64)gridDim.x * ROWS) {
        const i64 output = first + (IS_ACROSS ? thread % ROWS : thread / GROUP);
        const bool is_there = output < arguments.outputs;
        const Index count = is_there ? (Index)arguments.count : 0;
        const Bases bases = bases_at(arguments, (Index)(is_there ? output : 0));
        Row row;
        RESULTS
        if (is_there)
            finish(arguments, bases, row, (Index)output, lane, count);
    }
}
"""
