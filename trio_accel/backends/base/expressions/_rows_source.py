"""C++ of reductions and of expressions of rows: threads pass over a row for each reduction.

A row is what is reduced to one element. A reduction alone is made in parts where there are few rows, and a
second kernel combines these. An expression of rows passes over a row once more, for its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from ..contract.dtypes import DType
from ..contract.ops import identity_of
from ._pieces import REDUCING
from ._reduction import TypedReduction
from ._rows import COUNT, Argument, SpecializedReduction, SpecializedRows, found
from ._source import (
    Access,
    body,
    cast_of,
    element_of,
    elements_of_thread,
    indented,
    literal_of,
    load,
    prelude,
    register_of,
    structure,
)

ROW_THREADS = 256
"""Threads of a block, which combine what they found in shared memory."""

_NO_INDEX = "0x7fffffffffffffffll"


@attrs.frozen
class RowLayouts:
    """Layouts of the arrays of a reduction, or of an expression of rows: a kernel is compiled for them.

    Attributes:
        kept: How many axes stay, when contiguous axes are joined.
        reduced: How many axes make a row, likewise.
        access: With one axis of a row: for each array how its elements follow each other there, and last for
            the result of an expression of rows, if it is of their shape.
        is_wide: Whether numbers of elements take 64 bits.
        group: Threads that make a row, or a part of one.
        is_across: Whether neighbouring threads make neighbouring rows, rather than one row.
    """

    kept: int
    reduced: int
    access: tuple[Access, ...]
    is_wide: bool = False
    group: int = 1
    is_across: bool = False


def partial_bytes(reduction: TypedReduction) -> int:
    """Return the bytes of what one thread hands on to the second kernel."""
    dtype = reduction.accumulator
    size = 4 if dtype in (DType.float16, DType.bfloat16) else dtype.itemsize
    return -(-size // 8) * 8 + 8 if _has_index(reduction) else size


def _has_index(reduction: TypedReduction) -> bool:
    return reduction.reduction.is_index or reduction.combine is not None


def reduction_source(specialized: SpecializedReduction, layouts: RowLayouts) -> str:
    """Write the source of the kernels ``reduce``, ``finish_block`` and ``finish_serial``.

    Args:
        specialized: The reduction, and how it gets its arguments.
        layouts: Layouts of the arrays.
    """
    typed = specialized.typed
    names = Names(typed.reduction.map.inputs, specialized.arguments)
    own = "i64 outputs, count, parts;\n    i64 partial_step, output_step;\n    char *out, *partial;"
    store = f"{element_of(typed.dtype)}::store(arguments.out + output * {typed.dtype.itemsize}, result);"
    return "\n".join(
        (
            _passes([typed], names, layouts, own, len(names.arrays), typed.map.work),
            _REDUCE.replace("STORE", store),
        )
    )


def rows_source(specialized: SpecializedRows, layouts: RowLayouts) -> str:
    """Write the source of the kernel ``rows``.

    Args:
        specialized: The expression, and how it gets its arguments.
        layouts: Layouts of the arrays.
    """
    typed = specialized.typed
    names = Names(specialized.rows.inputs, specialized.arguments, len(typed.stages))
    steps = sum(stage.map.work for stage in typed.stages) + typed.last.work
    results = [
        f"row.{found(number)} = Stage{number}::result(arguments, in_group<Stage{number}, GROUP>("
        f"accumulate<Stage{number}>(arguments, bases, row, lane, GROUP, count)));"
        for number in range(len(typed.stages))
    ]
    own = "i64 outputs, count;\n    char *out;"
    return "\n".join(
        (
            _passes(typed.stages, names, layouts, own, len(names.arrays) + 1, steps),
            _last(specialized, names, layouts),
            _ROWS.replace("RESULTS", indented("\n".join(results)).strip()),
        )
    )


def _passes(
    stages: Sequence[TypedReduction], names: Names, layouts: RowLayouts, own: str, layers: int, steps: int
) -> str:
    """Write how threads pass over a row, and combine what they find.

    Args:
        stages: The reductions, each of which may use what the ones before have found.
        names: What these read.
        layouts: Layouts of the arrays.
        own: The arguments of the kernel ahead of arrays, numbers and layouts.
        layers: The number of arrays whose strides are among the arguments.
        steps: The number of steps of all expressions.
    """
    # C++ has no arrays of no elements.
    kept, reduced = max(layouts.kept, 1), max(layouts.reduced, 1)
    dtypes = list(names.arrays.values())
    registers = [f" {register_of(stage.dtype)} {found(number)};" for number, stage in enumerate(stages)]
    written = [stage_text(number, stage, names) for number, stage in enumerate(stages)]
    return f"""{prelude()}
typedef {"u64" if layouts.is_wide else "u32"} Index;
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
    {own}
    const char *in[{len(dtypes)}];
    Scalar scalars[{max(len(names.scalars), 1)}];
    i64 kept_shape[{kept}], reduced_shape[{reduced}];
    i64 kept_strides[{layers}][{kept}], reduced_strides[{layers}][{reduced}];
}};
constexpr int EACH = {elements_of_thread(dtypes, steps)};
{structure("Loaded", dtypes)}
struct Row {{{"".join(registers)} }};
{_addresses(names, layouts)}
{chr(10).join(written)}
{_PASSES}"""


class Names:
    """C++ of what an expression reads, by its names."""

    def __init__(self, inputs: Sequence[str], arguments: Sequence[Argument], stages: int = 0) -> None:
        pairs = list(zip(inputs, arguments, strict=True))
        self.arrays: Mapping[str, DType] = {name: each.dtype for name, each in pairs if each.is_array}
        self.scalars: Mapping[str, DType] = {name: each.dtype for name, each in pairs if not each.is_array}
        self.named = {name: f"loaded.x{number}" for number, name in enumerate(self.arrays)}
        for number, (name, dtype) in enumerate(self.scalars.items()):
            self.named[name] = load(dtype, f"at_scalar(arguments.scalars[{number}])")
        self.named[COUNT] = "arguments.count"
        for number in range(stages):
            self.named[found(number)] = f"row.{found(number)}"

    def texts(self, names: Sequence[str]) -> list[str]:
        return [self.named[name] for name in names]


def _addresses(names: Names, layouts: RowLayouts) -> str:
    """Write where a row begins in each array, and how one of its elements is loaded."""
    begins, loads = list[str](), list[str]()
    for number, dtype in enumerate(names.arrays.values()):
        begins.append(f"arguments.in[{number}]{_row_offset(layouts.kept, number)}")
        loads.append(
            load(dtype, f"bases.in{number} + {_step_in_row(layouts.reduced, layouts.access, number, dtype)}")
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


def stage_text(number: int, stage: TypedReduction, names: Names) -> str:
    """Write a structure of functions: how one reduction combines, and what it finds."""
    statements, (value,) = body(stage.map, names.texts(stage.reduction.map.inputs))
    value = cast_of(value, stage.map.dtypes[0], stage.accumulator)
    last, result = _finished(stage)
    return f"""struct Stage{number} {{
{indented(_combination(stage), 4)}
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


def _combination(reduction: TypedReduction) -> str:
    """Write the values that threads combine, and the combination."""
    register = register_of(reduction.accumulator)
    index = " i64 index;" if _has_index(reduction) else ""
    lines = [f"struct Partial {{ {register} value;{index} }};"]
    if reduction.combine is not None:
        assert reduction.reduction.combine is not None
        given = [f"{name}.value" for name in reduction.reduction.combine.inputs]
        statements, (result,) = body(reduction.combine, given)
        lines.append(f"""FUNCTION Partial nothing() {{ return {{{_identity(reduction)}, 0}}; }}
FUNCTION Partial element({register} value, i64) {{ return {{value, 1}}; }}
FUNCTION Partial combine(const Partial &a, const Partial &b)
{{
    if (!a.index)
        return b;
    if (!b.index)
        return a;
{indented(statements, 4)}
    return {{{result}, 1}};
}}""")
    elif reduction.reduction.is_index:
        less = "<" if reduction.reduction.name == "argmin" else ">"
        # A value that is not a number comes first, and the first of equal ones.
        lines.append(f"""FUNCTION Partial nothing() {{ return {{{_identity(reduction)}, {_NO_INDEX}}}; }}
FUNCTION Partial element({register} value, i64 index) {{ return {{value, index}}; }}
FUNCTION bool precedes({register} x, {register} y) {{ return x {less} y || (x != x && y == y); }}
FUNCTION Partial combine(const Partial &a, const Partial &b)
{{
    if (precedes(b.value, a.value))
        return b;
    return precedes(a.value, b.value) || a.index < b.index ? a : b;
}}""")
    else:
        lines.append(f"""FUNCTION Partial nothing() {{ return {{{_identity(reduction)}}}; }}
FUNCTION Partial element({register} value, i64) {{ return {{value}}; }}
FUNCTION Partial combine(const Partial &a, const Partial &b)
{{
    return {{f_{REDUCING[reduction.reduction.name]}(a.value, b.value)}};
}}""")
    return "\n".join(lines)


def _identity(reduction: TypedReduction) -> str:
    """C++ of what changes nothing."""
    dtype, name = reduction.accumulator, reduction.reduction.name
    if name == "expression":
        return literal_of(reduction.reduction.identity or 0, dtype)
    ordered = name[-3:]
    if ordered in ("min", "max"):
        if name.startswith("nan") and dtype.kind == "float":
            return literal_of(-np.nan if ordered == "max" else np.nan, dtype)
        return literal_of(identity_of(ordered, dtype), dtype)
    return literal_of(1 if name in ("prod", "all") else 0, dtype)


def _finished(reduction: TypedReduction) -> tuple[str, str]:
    """Write the last step of the combined value ``found``; return also the name of the result."""
    if reduction.reduction.is_index:
        value = "found.index"
    else:
        value = cast_of("found.value", reduction.accumulator, reduction.reduced)
    lines = [f"const {register_of(reduction.reduced)} result = {value};"]
    name = "result"
    if reduction.post is not None:
        post = reduction.reduction.post
        given = {"a": "result", "n": "arguments.count"}
        statements, (name,) = body(
            reduction.post, [given[each] for each in (post.inputs if post else ("a",))]
        )
        lines.append(statements)
    return "\n".join(lines), name


def _row_offset(kept: int, array: int) -> str:
    """C++ of what is added to the address of an array for the row that makes an output."""
    return (
        f" + offset_of<{kept}>(output, arguments.kept_shape, arguments.kept_strides[{array}])" if kept else ""
    )


def _step_in_row(reduced: int, access: Sequence[Access], array: int, dtype: DType) -> str:
    """C++ of the bytes from the beginning of a row to its element ``i``."""
    if reduced > 1:
        return f"offset_of<{reduced}>(i, arguments.reduced_shape, arguments.reduced_strides[{array}])"
    if not reduced or access[array] == "same":
        return "0"
    is_dense = access[array] == "dense"
    return f"(i64)i * {dtype.itemsize if is_dense else f'arguments.reduced_strides[{array}][0]'}"


def _last(specialized: SpecializedRows, names: Names, layouts: RowLayouts) -> str:
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
    {store}(arguments.out{_row_offset(layouts.kept, at)}, {result});
}}"""
    return f"""FUNCTION void store_at(const Arguments &arguments, const Row &row, const Loaded &loaded,
    char *out, Index i)
{{
{indented(statements, 4)}
    {store}(out + {_step_in_row(layouts.reduced, layouts.access, at, specialized.result)}, {result});
}}
FUNCTION void finish(const Arguments &arguments, const Bases &bases, const Row &row,
    Index output, Index lane, Index count)
{{
    char *const out = arguments.out{_row_offset(layouts.kept, at)};
    EACH_OF_ROW(lane, GROUP, store_at(arguments, row, loaded, out, i));
}}"""


# A thread loads several elements before it computes: memory is slow, and wide.
_PASSES = """
#define EACH_OF_ROW(first, step, statement)                                                          \\
    Index next = first;                                                                              \\
    for (; next + (EACH - 1) * (step) < count; next += EACH * (step)) {                              \\
        Loaded several[EACH];                                                                        \\
        _Pragma("unroll") for (int k = 0; k < EACH; k++)                                             \\
            several[k] = load_at(arguments, bases, next + k * (step));                               \\
        _Pragma("unroll") for (int k = 0; k < EACH; k++) {                                           \\
            const Loaded &loaded = several[k];                                                       \\
            const Index i = next + k * (step);                                                       \\
            statement;                                                                               \\
        }                                                                                            \\
    }                                                                                                \\
    for (Index i = next; i < count; i += step) {                                                     \\
        const Loaded loaded = load_at(arguments, bases, i);                                          \\
        statement;                                                                                   \\
    }

template <class Stage>
FUNCTION typename Stage::Partial accumulate(const Arguments &arguments, const Bases &bases, const Row &row,
    Index first, Index step, Index count)
{
    typename Stage::Partial found = Stage::nothing();
    EACH_OF_ROW(first, step, found = Stage::combine(found, Stage::mapped(arguments, row, loaded, i)));
    return found;
}

template <class Stage, int MANY> FUNCTION typename Stage::Partial in_group(typename Stage::Partial found)
{
#ifndef STAND_IN
    if (MANY == 1)
        return found;
    __shared__ typename Stage::Partial shared[THREADS];
    const int thread = BLOCK_THREAD, step = IS_ACROSS ? ROWS : 1;
    const int lane = IS_ACROSS ? thread / ROWS : thread % MANY;
    shared[thread] = found;
    __syncthreads();
#pragma unroll
    for (int half = MANY / 2; half; half /= 2) {
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

_REDUCE = """
typedef Stage0::Partial Partial;

FUNCTION void finish(const Arguments &arguments, i64 output, const Partial &found)
{
    const auto result = Stage0::result(arguments, found);
    STORE
}

KERNEL(reduce, Arguments)
{
    const int thread = (int)threadIdx.x, lane = thread % GROUP;
    const i64 outputs = arguments.outputs, parts = arguments.parts, items = outputs * parts;
    Partial *const partial = (Partial *)arguments.partial;
    for (i64 item = (i64)blockIdx.x * ROWS + thread / GROUP; item < items; item += (i64)gridDim.x * ROWS) {
        // Blocks lay the parts of a result side by side; threads lay results side by side.
        const i64 output = GROUP > 1 ? item / parts : item % outputs;
        const i64 part = GROUP > 1 ? item % parts : item / outputs;
        const Partial found = in_group<Stage0, GROUP>(
            accumulate<Stage0>(arguments, bases_at(arguments, (Index)output), Row(),
                (Index)(part * GROUP + lane), (Index)(parts * GROUP), (Index)arguments.count));
        if (lane)
            continue;
        if (parts == 1)
            finish(arguments, output, found);
        else
            partial[output * arguments.output_step + part * arguments.partial_step] = found;
    }
}

FUNCTION Partial combined(const Arguments &arguments, i64 output, i64 first, i64 step)
{
    const Partial *const partial = (const Partial *)arguments.partial + output * arguments.output_step;
    Partial found = Stage0::nothing();
    for (i64 part = first; part < arguments.parts; part += step)
        found = Stage0::combine(found, partial[part * arguments.partial_step]);
    return found;
}

KERNEL(finish_block, Arguments)
{
    if (IS_IDLE)
        return;
    for (i64 output = blockIdx.x; output < arguments.outputs; output += gridDim.x) {
        const Partial mine = combined(arguments, output, BLOCK_THREAD, BLOCK_THREADS);
        const Partial found = in_group<Stage0, THREADS>(mine);
        if (BLOCK_THREAD == 0)
            finish(arguments, output, found);
    }
}

KERNEL(finish_serial, Arguments)
{
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 output = (i64)blockIdx.x * blockDim.x + threadIdx.x; output < arguments.outputs; output += step)
        finish(arguments, output, combined(arguments, output, 0, 1));
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
