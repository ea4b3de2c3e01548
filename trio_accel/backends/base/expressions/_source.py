"""C++ of typed expressions, a body and its kernel, for all GPUs with the language of CUDA or HIP."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

import attrs
import numpy as np

from ..contract.dtypes import DType
from ..contract.errors import NotSupportedError
from ..contract.ops import identity_of
from ..contract.values import number_array
from ._arguments import Argument
from ._evaluate import word_of
from ._steps import TypedExpression, TypedStep

Access: TypeAlias = Literal["dense", "same", "strided"]
"""How elements of an array follow each other: without gaps, one for all, or by strides."""

_PRELUDE = Path(__file__).with_name("expressions.cu")

_REGISTERS = {
    **{
        dtype: f"{dtype.kind[0]}{8 * dtype.itemsize}"
        for dtype in DType
        if dtype.kind in ("int", "uint", "complex")
    },
    **dict.fromkeys((DType.float32, DType.float16, DType.bfloat16), "float"),
    DType.float64: "double",
    DType.bool: "bool",
}
_LOW = {DType.float16: "f16", DType.bfloat16: "bf16"}
# In these dtypes, the next number differs from the next float of the wider computation.
_OF_CODES = ("nextafter",)

_CHOICES = ("maximum", "minimum", "fmax", "fmin")
# These functions make results that need no rounding if their operands are rounded.
_EXACT = frozenset(
    {
        *("where", "minimum", "maximum", "fmin", "fmax", "negative", "positive", "absolute", "fabs", "floor"),
        *("ceil", "trunc", "rint", "sign", "copysign", "conjugate", "stop_gradient"),
    }
)


_NOTHING: Mapping[int, str] = MappingProxyType({})
_MASK = (1 << 64) - 1
# Element size in bytes up to which a thread takes more elements.
_NARROW_BYTES = 2
# From this number of steps or arrays on, a thread takes one element of an expression.
_MAX_SHORT_WORK, _MAX_SHORT_OPERANDS = 64, 8


@functools.cache
def prelude() -> str:
    """Return the types and functions that every kernel begins with."""
    return _PRELUDE.read_text(encoding="utf-8")


def register_of(dtype: DType) -> str:
    """Return the C++ type of a value."""
    return _REGISTERS[dtype]


def element_of(dtype: DType) -> str:
    """Return the C++ class that loads and stores elements."""
    return {DType.float16: "F16", DType.bfloat16: "BF16"}.get(dtype, f"Element<{register_of(dtype)}>")


def lines_of(
    number: int, program: TypedExpression, arguments: Sequence[str], there: Mapping[int, str] = _NOTHING
) -> list[str]:
    """Return the statements of a step. Its value gets the name ``t`` with its number.

    Args:
        number: Number of the step, which is not a reduction; `there` has reductions.
        program: The program.
        arguments: C++ of the arguments.
        there: C++ of steps that are computed elsewhere.
    """
    step, checks = program.steps[number], list[str]()
    operands = [f"t{operand}" for operand in step.steps]
    if number in there:
        value = there[number]
    elif of_loop := loop_lines(number, program.steps):
        return of_loop
    elif step.function.startswith("store_"):
        return [_store(number, program, operands)]
    elif step.function == "index":
        value = _index(step, program)
    elif step.function == "count":
        value = "arguments.count"
    elif step.function == "load":
        if program.checked:
            checks = [f"{check};" for check in checks_of(number, program, operands)]
        value = load(step.dtype, place_of(step, program, operands))
    else:
        value = value_of(step, arguments, program.steps)
    return [*checks, f"const {register_of(step.dtype)} t{number} = {value};"]


def loop_lines(number: int, steps: Sequence[TypedStep]) -> list[str]:
    """Return C++ for a loop's step (see `_steps`), or an empty list for any other step.

    Args:
        number: Number of the step. A loop opens a block, and its end closes it.
        steps: All steps.
    """
    step = steps[number]
    operands = [f"t{operand}" for operand in step.steps]
    if step.function in ("carried", "result"):
        const = "const " if step.function == "result" else ""
        return [f"{const}{register_of(step.dtype)} t{number} = {operands[0]};"]
    if step.function == "loop":
        return [f"for (i64 t{number} = {operands[0]}; t{number} < {operands[1]}; t{number}++) {{"]
    if step.function not in ("break", "end"):
        return []
    values = step.steps[2 if step.function == "break" else 1 :]
    variables = steps[step.steps[0]].steps[2:]
    changed = [
        (variable, value) for variable, value in zip(variables, values, strict=True) if variable != value
    ]
    # A variable may become what another one was.
    lines = [
        f"const {register_of(steps[variable].dtype)} n{variable} = t{value};" for variable, value in changed
    ]
    lines += [f"t{variable} = n{variable};" for variable, _ in changed]
    return [f"if ({operands[1]}) {{", *lines, "break;", "}"] if step.function == "break" else [*lines, "}"]


def _index(step: TypedStep, expression: TypedExpression) -> str:
    offset = 2 * expression.axes.index(int(step.value.real))
    return f"index_of(i, arguments.extents[{offset}], arguments.extents[{offset + 1}])"


def place_of(step: TypedStep, expression: TypedExpression, indices: Sequence[str]) -> str:
    """Return C++ for the address of an element.

    Args:
        step: The step that loads or stores it.
        expression: The expression.
        indices: C++ of its indices.
    """
    array, base = _source_of(step, expression)
    steps = [
        f"reached({index}, arguments.extents[{base + 2 * axis}], arguments.extents[{base + 2 * axis + 1}])"
        for axis, index in enumerate(indices)
    ]
    return " + ".join([f"arguments.loaded[{array}]", *steps])


def checks_of(number: int, expression: TypedExpression, indices: Sequence[str]) -> list[str]:
    """Return C++ conditions that an element's indices are in range; each notes an index out of range.

    Args:
        number: Number of the step that loads or stores.
        expression: The expression.
        indices: C++ of its indices. Indices ``i(axis)`` need no check.
    """
    step = expression.steps[number]
    _, base = _source_of(step, expression)
    return [
        f"is_inside({index}, arguments.extents[{base + 2 * axis}], arguments.status, {word_of(number, axis)})"
        for axis, index in enumerate(indices)
        if expression.steps[step.indices[axis]].function != "index"
    ]


def _source_of(step: TypedStep, expression: TypedExpression) -> tuple[int, int]:
    """Return which array a step loads from or stores to, and where the extents of the array are."""
    array = [number for number, _ in expression.loads].index(int(step.value.real))
    return array, 2 * (len(expression.axes) + sum(count for _, count in expression.loads[:array]))


def value_of(step: TypedStep, arguments: Sequence[str], steps: Sequence[TypedStep]) -> str:
    """C++ of an argument, a constant, a conversion or a function.

    Args:
        step: The step.
        arguments: C++ of the arguments.
        steps: All steps.
    """
    if step.function == "argument":
        return arguments[int(step.value.real)]
    if step.function == "constant":
        return literal_of(step.value, step.dtype)
    operands = [f"t{number}" for number in step.steps]
    if step.function == "cast":
        return cast_of(operands[0], steps[step.steps[0]].dtype, step.dtype)
    return call_of(step.function, step.dtype, operands)


def call_of(function: str, dtype: DType, operands: Sequence[str]) -> str:
    """C++ that computes a function, and rounds the result where its register is wider than the dtype."""
    is_low = dtype in _LOW
    if dtype is DType.float16 and function in _CHOICES:
        # NumPy takes the first of two zeros with different signs in float16, and the second one in others.
        operands = operands[::-1]
    if is_low and function in _OF_CODES:
        return f"f_{function}_{_LOW[dtype]}({', '.join(operands)})"
    value = f"f_{function}({', '.join(operands)})"
    return f"to_{_LOW[dtype]}({value})" if is_low and function not in _EXACT else value


def cast_of(value: str, source: DType, dtype: DType) -> str:
    """C++ that converts a value."""
    if source is dtype:
        return value
    if dtype in _LOW:
        # NumPy rounds float64 to float16 once, and everything else passes through float32.
        is_double = dtype is DType.float16 and source is DType.float64
        return f"to_{_LOW[dtype]}({value if is_double else f'Cast<float>::of({value})'})"
    return f"Cast<{register_of(dtype)}>::of({value})"


def literal_of(number: complex, dtype: DType) -> str:
    """Return C++ of a number, bit for bit."""
    # A number that the dtype cannot hold becomes infinite.
    with np.errstate(over="ignore"):
        value = number_array(number, dtype)
    if dtype.kind == "complex":
        part = DType.float32 if dtype is DType.complex64 else DType.float64
        parts = [literal_of(component, part) for component in (value.item().real, value.item().imag)]
        return f"({register_of(dtype)}{{{parts[0]}, {parts[1]}}})"
    if dtype in _LOW:
        return f"constant_f32({int(value.astype(np.float32).view(np.uint32)):#x}u)"
    if dtype is DType.float64:
        return f"constant_f64({int(value.view(np.uint64)):#x}ull)"
    if dtype is DType.float32:
        return f"constant_f32({int(value.view(np.uint32)):#x}u)"
    if dtype is DType.bool:
        return "true" if value else "false"
    return f"({register_of(dtype)}){int(value) & _MASK:#x}ull"


def identity_of_reduction(name: str, dtype: DType) -> str:
    """C++ of the value that a named reduction combines with another value without changing it."""
    ordered = name[-3:]
    if ordered not in ("min", "max"):
        return literal_of(1 if name in ("prod", "all") else 0, dtype)
    if name.startswith("nan") and dtype.kind == "float":
        return literal_of(-np.nan if ordered == "max" else np.nan, dtype)
    return literal_of(identity_of(ordered, dtype), dtype)


@attrs.frozen
class Layouts:
    """Layouts of a kernel's arrays. The kernel is compiled for them, independent of the extents.

    Attributes:
        axes: The number of axes after contiguous axes are joined.
        access: With one axis: for each array, results first, how its elements follow each other.
        is_wide: Whether numbers of elements take 64 bits.
    """

    axes: int
    access: tuple[Access, ...]
    is_wide: bool = False


def load(dtype: DType, address: str) -> str:
    """C++ that reads an element."""
    return f"{element_of(dtype)}::load({address})"


@attrs.frozen
class KernelArguments:
    """The arguments of a program in a kernel.

    Attributes:
        texts: C++ of each; empty for an array that is not read element by element.
        arrays: Dtypes of the arrays that are read element by element, which are fields of ``loaded``.
        scalars: The number of numbers that are passed with the launch.
    """

    texts: Sequence[str]
    arrays: Sequence[DType]
    scalars: int

    @staticmethod
    def of(program: TypedExpression, arguments: Sequence[Argument]) -> KernelArguments:
        """Find how a program gets its arguments."""
        texts, arrays, scalars = list[str](), list[DType](), 0
        for number, argument in enumerate(arguments):
            if not argument.is_array:
                texts.append(load(argument.dtype, f"at_scalar(arguments.scalars[{scalars}])"))
                scalars += 1
            elif number not in program.elements:
                texts.append("")
            else:
                texts.append(f"loaded.x{len(arrays)}")
                arrays.append(argument.dtype)
        return KernelArguments(texts, arrays, scalars)


def elementwise_source(
    program: TypedExpression, arguments: Sequence[Argument], layouts: Layouts, kernel: str = ""
) -> str:
    """Write the source of a kernel ``elementwise`` that computes every element of results, and stores others.

    Args:
        program: The program, without reductions.
        arguments: The form in which it gets its arguments.
        layouts: Layouts of the arrays that are written and read element by element.
        kernel: C++ that replaces the kernel. It calls ``load_at``, ``compute`` and ``store_at``.

    Raises:
        NotSupportedError: An element is too long for many threads to change it.
    """
    taken, results = KernelArguments.of(program, arguments), program.dtypes
    dtypes = (*results, *taken.arrays)
    offsets = _offsets_of(layouts, [dtype.itemsize for dtype in dtypes])
    loads = [
        load(dtype, f"arguments.in[{number}] + {offset}")
        for number, (dtype, offset) in enumerate(zip(taken.arrays, offsets[len(results) :], strict=True))
    ]
    trailing_stores = _last_stores(program)
    combining = [
        _combine(number, step)
        for number, step in enumerate(program.steps)
        if step.function.startswith("store_")
    ]
    # Stores outside of loops follow all loads, so that no load waits for them.
    computed = [
        *program.outputs,
        *[operand for number in trailing_stores for operand in program.steps[number].steps],
    ]
    lines = [
        line
        for number in range(len(program.steps))
        if number not in trailing_stores
        for line in lines_of(number, program, taken.texts)
    ]
    stores = [
        f"{element_of(dtype)}::store(arguments.out[{number}] + {offset}, made.x{number});"
        for number, (dtype, offset) in enumerate(zip(results, offsets, strict=False))
    ]
    fields = map("made.x{}".format, range(len(results), len(computed)))
    stores += [
        _store(number, program, list(islice(fields, len(program.steps[number].steps))))
        for number in trailing_stores
    ]
    return "\n".join(
        (
            prelude(),
            _arguments(program, len(results), len(taken.arrays), taken.scalars, layouts),
            f"enum {{ EACH = {elements_of_thread(dtypes, program.work)} }};",
            structure("Loaded", taken.arrays),
            structure("Made", [program.steps[number].dtype for number in computed]),
            *combining,
            _FUNCTIONS.format(
                loads=", ".join(loads),
                lines=indented("\n".join(lines), 4),
                names=", ".join(f"t{number}" for number in computed),
                stores=indented("\n".join(stores), 4),
            ),
            kernel or _ELEMENTWISE,
        )
    )


def _last_stores(program: TypedExpression) -> list[int]:
    """Return the stores outside of all loops."""
    stores, depth = list[int](), 0
    for number, step in enumerate(program.steps):
        depth += (step.function == "loop") - (step.function == "end")
        if step.function.startswith("store_") and not depth:
            stores.append(number)
    return stores


def elements_of_thread(dtypes: Sequence[DType], work: int) -> int:
    """Return the number of elements that a thread loads before it computes: memory is slow, and wide.

    Args:
        dtypes: Dtypes of the arrays.
        work: See `TypedExpression.work`: copies of a long one take registers and time to compile.
    """
    if work > _MAX_SHORT_WORK or len(dtypes) > _MAX_SHORT_OPERANDS:
        return 1
    return 8 if max(dtype.itemsize for dtype in dtypes) <= _NARROW_BYTES else 4


def structure(name: str, dtypes: Sequence[DType]) -> str:
    """C++ of a structure with a field for each value."""
    fields = "".join(f" {register_of(dtype)} x{number};" for number, dtype in enumerate(dtypes))
    return f"struct {name} {{{fields} }};"


_FUNCTIONS = """FUNCTION Loaded load_at(const Arguments &arguments, Index i)
{{
    return {{{loads}}};
}}
FUNCTION Made compute(const Arguments &arguments, Index i, const Loaded &loaded)
{{
{lines}
    return {{{names}}};
}}
FUNCTION void store_at(const Arguments &arguments, Index i, const Made &made)
{{
{stores}
}}"""

_ELEMENTWISE = """
KERNEL(elementwise, Arguments)
{
    const Index count = (Index)arguments.count, tile = (Index)blockDim.x * EACH;
    for (Index first = blockIdx.x * tile + threadIdx.x; first < count; first += gridDim.x * tile) {
        if (first + (EACH - 1) * blockDim.x < count) {
            Loaded loaded[EACH];
            Made made[EACH];
#pragma unroll
            for (int k = 0; k < EACH; k++)
                loaded[k] = load_at(arguments, first + k * blockDim.x);
#pragma unroll
            for (int k = 0; k < EACH; k++)
                made[k] = compute(arguments, first + k * blockDim.x, loaded[k]);
#pragma unroll
            for (int k = 0; k < EACH; k++)
                store_at(arguments, first + k * blockDim.x, made[k]);
        } else {
            for (Index i = first; i < count; i += blockDim.x)
                store_at(arguments, i, compute(arguments, i, load_at(arguments, i)));
        }
    }
}
"""


def extents_of(expression: TypedExpression) -> int:
    """Return the number of extents and strides that a kernel gets for indices and loads: two per axis."""
    return 2 * (len(expression.axes) + sum(count for _, count in expression.loads))


def _arguments(expression: TypedExpression, results: int, arrays: int, scalars: int, layouts: Layouts) -> str:
    # C++ lacks empty arrays.
    axes, fields = layouts.axes, ""
    if expression.loads:
        fields += f"    const char *loaded[{len(expression.loads)}];\n"
    if extents_of(expression):
        fields += f"    i64 extents[{extents_of(expression)}];\n"
    if expression.checked:
        fields += "    i32 *status;\n"
    return f"""typedef {"u64" if layouts.is_wide else "u32"} Index;
struct Arguments {{
    i64 count;
    char *out[{max(results, 1)}];
    const char *in[{max(arrays, 1)}];
    Scalar scalars[{max(scalars, 1)}];
    i64 shape[{max(axes, 1)}];
    i64 strides[{results + arrays}][{max(axes, 1)}];
{fields}}};"""


def _offsets_of(layouts: Layouts, sizes: Sequence[int]) -> list[str]:
    """Return C++ of each array's offset of element ``i``, for as many arrays as there are sizes."""
    if layouts.axes > 1:
        return [
            f"offset_of<{layouts.axes}>(i, arguments.shape, arguments.strides[{number}])"
            for number in range(len(sizes))
        ]
    # The stride of elements without gaps is known when the kernel is compiled.
    formats: dict[Access, str] = {
        "same": "0",
        "dense": "(i64)i * {size}",
        "strided": "(i64)i * arguments.strides[{number}][0]",
    }
    return [
        formats[access].format(number=number, size=size)
        for number, (access, size) in enumerate(zip(layouts.access, sizes, strict=False))
    ]


def indented(text: str, spaces: int = 8) -> str:
    """Return the lines, indented."""
    return "\n".join(f"{' ' * spaces}{line}" for line in text.splitlines())


COMBINING: Mapping[str, str] = {"add": "add", "multiply": "multiply", "min": "minimum", "max": "maximum"}

# C++ types that devices add to in one step, with the parts of an element.
_ADDED = {
    DType.float32: ("float", ("value",)),
    DType.float64: ("double", ("value",)),
    DType.complex64: ("float", ("value.re", "value.im")),
    DType.complex128: ("double", ("value.re", "value.im")),
    DType.int32: ("u32", ("value",)),
    DType.uint32: ("u32", ("value",)),
    DType.int64: ("u64", ("value",)),
    DType.uint64: ("u64", ("value",)),
}
# C++ of an element's bits as a value, and of the value as bits, where they are not of one size.
_BITS = {
    DType.bool: ("bits != 0", "(Bits){}"),
    DType.float16: ("from_f16(bits)", "f16_code({})"),
    DType.bfloat16: ("from_bf16(bits)", "bf16_code({})"),
}


def _store(number: int, program: TypedExpression, operands: Sequence[str]) -> str:
    """C++ of a step that stores.

    Args:
        number: Number of the step.
        program: The program.
        operands: C++ of the value, and of the indices.
    """
    value, *indices = operands
    stored = f"combine_{number}((char *)({place_of(program.steps[number], program, indices)}), {value});"
    checks = checks_of(number, program, indices) if program.checked else ()
    return f"if ({' & '.join(checks)})\n    {stored}" if checks else stored


def _combine(number: int, step: TypedStep) -> str:
    """Return C++ for a store's function, which many threads may call for one element."""
    dtype, reduce = step.dtype, step.function.removeprefix("store_")
    register = register_of(dtype)
    if reduce == "set":
        lines = [f"{element_of(dtype)}::store(at, value);"]
    elif reduce == "add" and dtype in _ADDED:
        kind, parts = _ADDED[dtype]
        lines = [f"atomicAdd(({kind} *)at + {n}, ({kind}){part});" for n, part in enumerate(parts)]
    elif dtype.itemsize > 8:
        raise NotSupportedError(
            f"reduce={reduce!r} of {dtype}: a GPU updates at most 8 bytes atomically; use complex64"
        )
    else:
        decode, encode = _BITS.get(dtype, (f"bits_as<{register}>(bits)", "bits_as<Bits>({})"))
        combined = encode.format(call_of(COMBINING[reduce], dtype, (decode, "value")))
        return _SWAPPED.format(
            number=number,
            bits=f"u{8 * dtype.itemsize}",
            word=f"u{8 * max(dtype.itemsize, 4)}",
            register=register,
            made=combined,
        )
    return f"FUNCTION void combine_{number}(char *at, {register} value) {{ {' '.join(lines)} }}"


# A short element is changed with the word around it.
_SWAPPED = """FUNCTION void combine_{number}(char *at, {register} value)
{{
    typedef {bits} Bits;
    typedef {word} Word;
    const int shift = sizeof(Bits) < sizeof(Word) ? 8 * (int)((u64)at % sizeof(Word)) : 0;
    Word *word = (Word *)(at - shift / 8), old, seen = *word;
    do {{
        old = seen;
        const Bits bits = (Bits)(old >> shift), made = {made};
        if (made == bits)
            return;
        seen = atomicCAS(word, old, (old & ~((Word)(Bits)~(Bits)0 << shift)) | (Word)made << shift);
    }} while (seen != old);
}}"""
