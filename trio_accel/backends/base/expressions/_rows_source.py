"""C++ of programs with reductions: threads pass over a row for each reduction.

A row is the elements that are reduced to one. If there are few rows, a single reduction is made in parts, and
a second kernel combines them. An expression of rows passes over a row once more, for its result.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import attrs

from ..contract.dtypes import DType
from ._arguments import Argument
from ._pieces import REDUCING
from ._source import (
    Access,
    KernelArguments,
    element_of,
    elements_of_thread,
    identity_of_reduction,
    indented,
    lines_of,
    literal_of,
    load,
    prelude,
    register_of,
    structure,
)
from ._steps import TypedExpression, TypedStep, needed_steps

ROW_THREADS = 256
"""Threads of a block, which combine what they found in shared memory."""

_SIDES = {"left": "a.value", "right": "b.value"}


@attrs.frozen
class RowLayouts:
    """Layouts of the arrays in a reduction, or in an expression of rows. Each layout has its own kernel.

    Attributes:
        kept_axes: The number of axes that remain after contiguous axes are joined.
        reduced: A row's number of axes, likewise.
        access: If a row has one axis: for each array, how its elements follow each other there; then likewise
            for the result of an expression of rows, if the result has their shape.
        is_wide: Whether numbers of elements take 64 bits.
        group: Threads that make a row, or a part of one.
        is_across: Whether neighbouring threads make neighbouring rows, rather than one row.
    """

    kept_axes: int
    reduced: int
    access: tuple[Access, ...]
    is_wide: bool = False
    group: int = 1
    is_across: bool = False


def partial_bytes(program: TypedExpression) -> int:
    """Return the bytes that one thread passes to the second kernel."""
    reduction = next(step for step in program.steps if step.is_reduction)
    dtype = program.steps[reduction.steps[0]].dtype
    size = 4 if dtype in (DType.float16, DType.bfloat16) else dtype.itemsize
    return -(-size // 8) * 8 + 8 if _has_index(reduction) else size


def _has_index(reduction: TypedStep) -> bool:
    return reduction.function in ("fold", "reduce_argmin", "reduce_argmax")


def reduction_source(program: TypedExpression, arguments: Sequence[Argument], layouts: RowLayouts) -> str:
    """Write the source of the kernels ``reduce``, ``finish_block`` and ``finish_serial``.

    Args:
        program: A program with one reduction, and with one result, which reads no elements.
        arguments: The form in which it gets its arguments.
        layouts: Layouts of the arrays.
    """
    rows, (output,) = _Rows(program, arguments), program.outputs
    lines = rows.lines([output], dict.fromkeys(rows.stages, "Stage0::value(found)"))
    dtype = program.steps[output].dtype
    leading_fields = (
        "i64 outputs, count, parts;\n    i64 partial_step, output_step;\n    char *out, *partial;"
    )
    store = f"{element_of(dtype)}::store(arguments.out + output * {dtype.itemsize}, t{output});"
    kernels = _REDUCE.replace("RESULT", indented("\n".join((*lines, store)), 4).strip())
    return "\n".join((_passes(rows, layouts, leading_fields, (), len(rows.taken.arrays)), kernels))


def rows_source(
    program: TypedExpression, arguments: Sequence[Argument], layouts: RowLayouts, *, is_whole: bool
) -> str:
    """Write the source of the kernel ``rows``.

    Args:
        program: The program.
        arguments: The form in which it gets its arguments.
        layouts: Layouts of the arrays, and of the results.
        is_whole: Whether the results have the shape of the arrays.
    """
    rows = _Rows(program, arguments)
    row_steps, first_result = rows.row_steps, len(rows.taken.arrays)
    row = {number: f"row.t{number}" for number in row_steps}
    calls = {
        result_step: f"Stage{number}::value(in_group<Stage{number}, GROUP>("
        f"accumulate<Stage{number}>(arguments, bases, row, lane, GROUP, count)))"
        for number, result_step in enumerate(rows.stages)
    }
    results = rows.lines(row_steps, calls, row_steps)
    begins, stores = list[str](), rows.lines(program.outputs, row)
    for number, (output, dtype) in enumerate(zip(program.outputs, program.dtypes, strict=True)):
        layer = first_result + number
        begins.append(f"arguments.out[{number}]{_row_offset(layouts.kept_axes, layer)}")
        step = _step_in_row(layouts.reduced, layouts.access, layer, dtype)
        address = f"begins.out{number} + {step}" if is_whole else begins[-1]
        stores.append(f"{element_of(dtype)}::store({address}, t{output});")
    finish = _FINISH_ROW_SOURCE
    if is_whole:
        fields = "".join([f" char *out{number};" for number in range(len(begins))])
        finish = _STORE_ROW_SOURCE.replace("FIELDS", fields).replace("BEGINS", ", ".join(begins))
    finish = finish.replace("STORE", indented("\n".join(stores), 4).strip())
    leading_fields = f"i64 outputs, count;\n    char *out[{len(begins)}];"
    kernel = _ROWS.replace("RESULTS", indented("\n".join(results)).strip())
    layers = first_result + len(begins)
    return "\n".join((_passes(rows, layouts, leading_fields, row_steps, layers), finish, kernel))


class _Rows:
    """The statements of a program with reductions.

    Attributes:
        taken: The arguments.
        stages: The reductions by the steps with their values, in order.
        row_steps: The values of a row that its elements or the last statements read after reductions.
        work: The number of element steps in all passes; a loop counts as many.
    """

    def __init__(self, program: TypedExpression, arguments: Sequence[Argument]) -> None:
        self.taken = KernelArguments.of(program, arguments)
        self._program, steps = program, program.steps
        # The last step of a fold has its value.
        self.stages = {
            int(step.value.real) if step.function == "fold" else number: number
            for number, step in enumerate(steps)
            if step.is_reduction
        }
        arrays = {number for number, argument in enumerate(arguments) if argument.is_array}
        elements = _reached(
            steps,
            [n for n, step in enumerate(steps) if step.function == "argument" and step.value in arrays],
        )
        reading = [step.steps for n, step in enumerate(steps) if n in elements or step.is_reduction]
        read = {*program.outputs}.union(*reading)
        self.row_steps = sorted((_reached(steps, self.stages) - elements) & read)
        passes = [needed_steps(steps, steps[number].steps, self.row_steps) for number in self.stages.values()]
        passes.append(needed_steps(steps, program.outputs, self.row_steps) & elements)
        used = [steps[number] for numbers in passes for number in numbers]
        self.work = len(used) + 1000 * any(step.function == "loop" for step in used)

    def lines(
        self, outputs: Iterable[int], there: Mapping[int, str], row_steps: Container[int] = ()
    ) -> list[str]:
        """Return the statements that compute some values; see `_statements`."""
        return _statements(self._program, outputs, there, self.taken.texts, row_steps)

    def structure(self, row_steps: Sequence[int]) -> str:
        """Return C++ for a row's values that later passes read."""
        fields = [f" {register_of(self._program.steps[number].dtype)} t{number};" for number in row_steps]
        return f"struct Row {{{''.join(fields)} }};"

    def stage(self, stage_number: int, result_step: int) -> str:
        """Write a structure of functions: how one reduction combines values, and its result."""
        number, steps = self.stages[result_step], self._program.steps
        (operand,) = steps[number].steps
        is_place = steps[number].function.startswith("reduce_arg")
        return _STAGE.format(
            number=stage_number,
            combination=indented(combination_of(self._program, number), 4),
            lines=indented(
                "\n".join(
                    self.lines([operand], {row_step: f"row.t{row_step}" for row_step in self.row_steps})
                )
            ),
            operand=operand,
            register=register_of(steps[result_step].dtype),
            value="index" if is_place else "value",
        )


def _statements(
    program: TypedExpression,
    outputs: Iterable[int],
    there: Mapping[int, str],
    arguments: Sequence[str] = (),
    row_steps: Container[int] = (),
) -> list[str]:
    """Return the statements that compute some values.

    Args:
        program: The program.
        outputs: Numbers of the steps with these values.
        there: C++ of steps that are computed elsewhere.
        arguments: C++ of the arguments.
        row_steps: Steps with values that become fields of ``row``.
    """
    targets, lines = {*outputs}, list[str]()
    numbers = needed_steps(program.steps, [*targets], there)
    read = targets.union(*[program.steps[number].steps for number in numbers])
    for number in sorted(numbers | (read & there.keys())):
        lines += lines_of(number, program, arguments, there)
        if number in row_steps:
            lines.append(f"row.t{number} = t{number};")
    return lines


def _reached(steps: Sequence[TypedStep], sources: Iterable[int]) -> set[int]:
    """Return the steps that values of some steps reach, but by no reduction; all of a loop if any of it."""
    reached = set(sources)
    for number, step in enumerate(steps):
        if not step.is_reduction and not reached.isdisjoint(step.steps):
            reached.add(number)
        if step.function == "end":
            loop = step.steps[0]
            loop_steps = {*steps[loop].steps[2:], *range(loop, number + 1)}
            if not reached.isdisjoint(loop_steps):
                reached |= loop_steps
    return reached


def _passes(
    rows: _Rows, layouts: RowLayouts, leading_fields: str, row_steps: Sequence[int], layers: int
) -> str:
    """Write how threads pass over a row, and combine their results.

    Args:
        rows: The statements.
        layouts: Layouts of the arrays.
        leading_fields: The arguments of the kernel before arrays, numbers and layouts.
        row_steps: The values of a row that later passes read.
        layers: The number of arrays with strides among the arguments.
    """
    # C++ lacks empty arrays.
    axes, reduced, dtypes = max(layouts.kept_axes, 1), max(layouts.reduced, 1), rows.taken.arrays
    stages = [rows.stage(stage_number, result_step) for stage_number, result_step in enumerate(rows.stages)]
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
    {leading_fields}
    const char *in[{len(dtypes)}];
    Scalar scalars[{max(rows.taken.scalars, 1)}];
    i64 kept_shape[{axes}], reduced_shape[{reduced}];
    i64 kept_strides[{layers}][{axes}], reduced_strides[{layers}][{reduced}];
}};
constexpr int EACH = {elements_of_thread(dtypes, rows.work)};
{structure("Loaded", dtypes)}
{rows.structure(row_steps)}
{_addresses(dtypes, layouts)}
{chr(10).join(stages)}
{_PASSES}"""


def _addresses(dtypes: Sequence[DType], layouts: RowLayouts) -> str:
    """Write where a row begins in each array, and how one of its elements is loaded."""
    begins, loads = list[str](), list[str]()
    for number, dtype in enumerate(dtypes):
        begins.append(f"arguments.in[{number}]{_row_offset(layouts.kept_axes, number)}")
        step = _step_in_row(layouts.reduced, layouts.access, number, dtype)
        loads.append(load(dtype, f"bases.in{number} + {step}"))
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


def combination_of(program: TypedExpression, number: int) -> str:
    """Write the values that threads combine, and the combination.

    Args:
        program: The program.
        number: Number of the reduction.
    """
    step = program.steps[number]
    dtype, name = program.steps[step.steps[0]].dtype, step.function.removeprefix("reduce_")
    parts = {"register": register_of(dtype), "identity": _identity(program, number)}
    if name == "fold":
        end = int(step.value.real)
        pair = {
            side: _SIDES[program.steps[side].function]
            for side in range(number, end)
            if program.steps[side].function in _SIDES
        }
        combined = program.steps[end].steps[1]
        lines = _statements(program, [combined], pair)
        return _FOLD.format(**parts, lines=indented("\n".join(lines), 4), made=combined)
    if name.startswith("arg"):
        return _INDEX_PARTIAL_SOURCE.format(**parts, less="<" if name == "argmin" else ">")
    return _COMBINED.format(**parts, function=REDUCING[name])


def _identity(program: TypedExpression, number: int) -> str:
    """Return C++ of the neutral element."""
    step = program.steps[number]
    dtype, name = program.steps[step.steps[0]].dtype, step.function.removeprefix("reduce_")
    if name == "fold":
        return literal_of(program.steps[int(step.value.real)].value, dtype)
    return identity_of_reduction(name, dtype)


def _row_offset(kept_axes: int, array: int) -> str:
    """Return C++ for the offset of an array's row that makes an output."""
    return (
        f" + offset_of<{kept_axes}>(output, arguments.kept_shape, arguments.kept_strides[{array}])"
        if kept_axes
        else ""
    )


def _step_in_row(reduced: int, access: Sequence[Access], array: int, dtype: DType) -> str:
    """C++ of the bytes from the beginning of a row to its element ``i``."""
    if reduced > 1:
        return f"offset_of<{reduced}>(i, arguments.reduced_shape, arguments.reduced_strides[{array}])"
    if not reduced or access[array] == "same":
        return "0"
    is_dense = access[array] == "dense"
    return f"(i64)i * {dtype.itemsize if is_dense else f'arguments.reduced_strides[{array}][0]'}"


_STAGE = """struct Stage{number} {{
{combination}
    FUNCTION Partial mapped(const Arguments &arguments, const Row &row, const Loaded &loaded, Index i)
    {{
{lines}
        return element(t{operand}, (i64)i);
    }}
    FUNCTION {register} value(const Partial &found) {{ return found.{value}; }}
}};"""

_COMBINED = """struct Partial {{ {register} value; }};
FUNCTION Partial nothing() {{ return {{{identity}}}; }}
FUNCTION Partial element({register} value, i64) {{ return {{value}}; }}
FUNCTION Partial combine(const Partial &a, const Partial &b)
{{
    return {{f_{function}(a.value, b.value)}};
}}"""

# NaN comes first; of equal values, the first one counts.
_INDEX_PARTIAL_SOURCE = """struct Partial {{ {register} value; i64 index; }};
FUNCTION Partial nothing() {{ return {{{identity}, 0x7fffffffffffffffll}}; }}
FUNCTION Partial element({register} value, i64 index) {{ return {{value, index}}; }}
FUNCTION bool precedes({register} x, {register} y) {{ return x {less} y || (x != x && y == y); }}
FUNCTION Partial combine(const Partial &a, const Partial &b)
{{
    if (precedes(b.value, a.value))
        return b;
    return precedes(a.value, b.value) || a.index < b.index ? a : b;
}}"""

_FOLD = """struct Partial {{ {register} value; i64 index; }};
FUNCTION Partial nothing() {{ return {{{identity}, 0}}; }}
FUNCTION Partial element({register} value, i64) {{ return {{value, 1}}; }}
FUNCTION Partial combine(const Partial &a, const Partial &b)
{{
    if (!a.index)
        return b;
    if (!b.index)
        return a;
{lines}
    return {{t{made}, 1}};
}}"""

_STORE_ROW_SOURCE = """\
struct Begins {FIELDS };
FUNCTION void store_at(const Arguments &arguments, const Row &row, const Loaded &loaded,
    const Begins &begins, Index i)
{
    STORE
}
FUNCTION void finish(const Arguments &arguments, const Bases &bases, const Row &row,
    Index output, Index lane, Index count)
{
    const Begins begins = {BEGINS};
    EACH_OF_ROW(lane, GROUP, store_at(arguments, row, loaded, begins, i));
}"""

_FINISH_ROW_SOURCE = """FUNCTION void finish(const Arguments &arguments, const Bases &, const Row &row,
    Index output, Index lane, Index)
{
    if (lane)
        return;
    STORE
}"""

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
    RESULT
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
