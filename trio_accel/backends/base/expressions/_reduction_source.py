"""C++ of typed reductions: by blocks or by threads, in parts that a second kernel combines."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from ..contract.dtypes import DType
from ..contract.ops import identity_of
from ._reduction import TypedReduction
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

REDUCTION_THREADS = 256
"""Threads of a block, which combine what they found in shared memory."""

_NO_INDEX = "0x7fffffffffffffffll"
_COMBINE = {
    "sum": "f_add(a.value, b.value)",
    "prod": "f_multiply(a.value, b.value)",
    "mean": "f_add(a.value, b.value)",
    "min": "f_minimum(a.value, b.value)",
    "max": "f_maximum(a.value, b.value)",
    "nanmin": "f_fmin(a.value, b.value)",
    "nanmax": "f_fmax(a.value, b.value)",
    "any": "a.value || b.value",
    "all": "a.value && b.value",
}


@attrs.frozen
class ReductionLayouts:
    """Layouts of the arrays of a reduction: a kernel is compiled for them, whatever the extents are.

    Attributes:
        kept: How many axes stay, when contiguous axes are joined.
        reduced: How many axes are reduced, likewise.
        access: With one reduced axis: for each array, how its elements follow each other there.
        is_wide: Whether numbers of elements take 64 bits.
        is_block: Whether blocks reduce, rather than threads.
    """

    kept: int
    reduced: int
    access: tuple[Access, ...]
    is_wide: bool = False
    is_block: bool = False


def partial_bytes(reduction: TypedReduction) -> int:
    """Return the bytes of what one thread hands on to the second kernel."""
    dtype = reduction.accumulator
    size = 4 if dtype in (DType.float16, DType.bfloat16) else dtype.itemsize
    return -(-size // 8) * 8 + 8 if _has_index(reduction) else size


def _has_index(reduction: TypedReduction) -> bool:
    return reduction.reduction.is_index or reduction.combine is not None


def reduction_source(
    reduction: TypedReduction,
    inputs: Sequence[DType | None],
    scalars: Sequence[DType],
    layouts: ReductionLayouts,
) -> str:
    """Write the source of the kernels ``reduce``, ``finish_block`` and ``finish_serial``.

    The first reduces elements, one result for each block or for each thread. If results are made in parts,
    the others combine these.

    Args:
        reduction: The typed reduction.
        inputs: Dtypes of its arguments that are arrays; None for those that are scalars.
        scalars: Dtypes of the scalars, in order.
        layouts: Layouts of the arrays.
    """
    return "\n".join(
        (
            prelude(),
            _arguments(sum(dtype is not None for dtype in inputs), len(scalars), layouts),
            combination(reduction),
            _finish(reduction),
            _accumulate(reduction, inputs, scalars, layouts),
            _IN_BLOCK,
            _REDUCE_BLOCK if layouts.is_block else _REDUCE_SERIAL,
            _FINISH,
        )
    )


def _arguments(arrays: int, scalars: int, layouts: ReductionLayouts) -> str:
    # C++ has no arrays of no elements.
    kept, reduced = max(layouts.kept, 1), max(layouts.reduced, 1)
    return f"""typedef {"u64" if layouts.is_wide else "u32"} Index;
enum {{ THREADS = {REDUCTION_THREADS} }};
struct Arguments {{
    i64 outputs, count, parts;
    i64 partial_step, output_step;
    char *out, *partial;
    const char *in[{max(arrays, 1)}];
    Scalar scalars[{max(scalars, 1)}];
    i64 kept_shape[{kept}], reduced_shape[{reduced}];
    i64 kept_strides[{max(arrays, 1)}][{kept}], reduced_strides[{max(arrays, 1)}][{reduced}];
}};"""


def combination(reduction: TypedReduction) -> str:
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
    return {{{_COMBINE[reduction.reduction.name]}}};
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


def _finish(reduction: TypedReduction) -> str:
    """Write the last step of the combined value, and its store."""
    statements, name = finished(reduction)
    size = reduction.dtype.itemsize
    store = f"{element_of(reduction.dtype)}::store(arguments.out + output * {size}, {name});"
    return f"""FUNCTION void finish(const Arguments &arguments, i64 output, const Partial &found)
{{
{indented(statements, 4)}
    {store}
}}"""


def finished(reduction: TypedReduction) -> tuple[str, str]:
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


def _accumulate(
    reduction: TypedReduction,
    inputs: Sequence[DType | None],
    scalars: Sequence[DType],
    layouts: ReductionLayouts,
) -> str:
    """Return a function that reduces what one thread has to; it loads several elements before it computes."""
    arrays = [dtype for dtype in inputs if dtype is not None]
    bases, loads, taken, numbers = list[str](), list[str](), list[str](), 0
    for dtype in inputs:
        if dtype is None:
            taken.append(load(scalars[numbers], f"at_scalar(arguments.scalars[{numbers}])"))
            numbers += 1
            continue
        array = len(bases)
        kept = row_offset(layouts.kept, array)
        bases.append(f"const char *const base{array} = arguments.in[{array}]{kept};")
        loads.append(
            load(dtype, f"base{array} + {step_in_row(layouts.reduced, layouts.access, array, dtype)}")
        )
        taken.append(f"loaded.x{array}")
    statements, (result,) = body(reduction.map, taken)
    elements = indented(statements, 4)
    value = cast_of(result, reduction.map.dtypes[0], reduction.accumulator)
    return f"""enum {{ EACH = {elements_of_thread(arrays, len(reduction.map.steps))} }};
{structure("Loaded", arrays)}
FUNCTION Partial mapped(const Arguments &arguments, const Loaded &loaded, Index i)
{{
{elements}
    return element({value}, (i64)i);
}}
#define BASES {" ".join(bases)}
#define LOAD {{{", ".join(loads)}}}
{_ACCUMULATE}"""


_ACCUMULATE = """
FUNCTION Partial accumulate(const Arguments &arguments, Index output, Index first, Index step)
{
    BASES
    const Index count = (Index)arguments.count;
    Partial found = nothing();
    Index next = first;
    for (; next + (EACH - 1) * step < count; next += EACH * step) {
        Loaded loaded[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const Index i = next + k * step;
            loaded[k] = LOAD;
        }
#pragma unroll
        for (int k = 0; k < EACH; k++)
            found = combine(found, mapped(arguments, loaded[k], next + k * step));
    }
    for (Index i = next; i < count; i += step) {
        const Loaded loaded = LOAD;
        found = combine(found, mapped(arguments, loaded, i));
    }
    return found;
}
"""


def row_offset(kept: int, array: int) -> str:
    """C++ of what is added to the address of an array for the row that makes an output."""
    return (
        f" + offset_of<{kept}>(output, arguments.kept_shape, arguments.kept_strides[{array}])" if kept else ""
    )


def step_in_row(reduced: int, access: Sequence[Access], array: int, dtype: DType) -> str:
    """C++ of the bytes from the beginning of a row to its element ``i``."""
    if reduced > 1:
        return f"offset_of<{reduced}>(i, arguments.reduced_shape, arguments.reduced_strides[{array}])"
    if not reduced or access[array] == "same":
        return "0"
    is_dense = access[array] == "dense"
    return f"(i64)i * {dtype.itemsize if is_dense else f'arguments.reduced_strides[{array}][0]'}"


_IN_BLOCK = """
FUNCTION Partial in_block(Partial found)
{
#ifndef STAND_IN
    __shared__ Partial shared[THREADS];
    const int thread = BLOCK_THREAD;
    shared[thread] = found;
    __syncthreads();
#pragma unroll
    for (int half = THREADS / 2; half; half /= 2) {
        if (thread < half)
            shared[thread] = combine(shared[thread], shared[thread + half]);
        __syncthreads();
    }
    found = shared[0];
    __syncthreads();
#endif
    return found;
}
"""

_REDUCE_BLOCK = """
KERNEL(reduce, Arguments)
{
    if (IS_IDLE)
        return;
    const i64 items = arguments.outputs * arguments.parts;
    for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
        const i64 output = item / arguments.parts, part = item % arguments.parts;
        const Partial found = in_block(accumulate(arguments, (Index)output,
            (Index)(part * BLOCK_THREADS + BLOCK_THREAD), (Index)(arguments.parts * BLOCK_THREADS)));
        if (BLOCK_THREAD == 0) {
            if (arguments.parts == 1)
                finish(arguments, output, found);
            else
                ((Partial *)arguments.partial)[item] = found;
        }
    }
}
"""

_REDUCE_SERIAL = """
KERNEL(reduce, Arguments)
{
    const i64 items = arguments.outputs * arguments.parts, step = (i64)gridDim.x * blockDim.x;
    for (i64 item = (i64)blockIdx.x * blockDim.x + threadIdx.x; item < items; item += step) {
        const i64 output = item % arguments.outputs, part = item / arguments.outputs;
        const Partial found = accumulate(arguments, (Index)output, (Index)part, (Index)arguments.parts);
        if (arguments.parts == 1)
            finish(arguments, output, found);
        else
            ((Partial *)arguments.partial)[item] = found;
    }
}
"""

_FINISH = """
FUNCTION Partial combined(const Arguments &arguments, i64 output, i64 first, i64 step)
{
    const Partial *const partial = (const Partial *)arguments.partial + output * arguments.output_step;
    Partial found = nothing();
    for (i64 part = first; part < arguments.parts; part += step)
        found = combine(found, partial[part * arguments.partial_step]);
    return found;
}

KERNEL(finish_block, Arguments)
{
    if (IS_IDLE)
        return;
    for (i64 output = blockIdx.x; output < arguments.outputs; output += gridDim.x) {
        const Partial found = in_block(combined(arguments, output, BLOCK_THREAD, BLOCK_THREADS));
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
