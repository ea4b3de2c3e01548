"""C++ of expressions whose values are stored at places that are computed, too."""

from __future__ import annotations

from collections.abc import Sequence

from ..contract.dtypes import DType
from ..contract.errors import NotSupportedError
from ..contract.ops import Reduce
from ._checked import places_of
from ._source import (
    Layouts,
    call_of,
    checks_of,
    element_of,
    kernel_source,
    place_of,
    register_of,
)
from ._typing import TypedExpression

__all__ = ["scatter_source"]

_FUNCTIONS = {"add": "add", "multiply": "multiply", "min": "minimum", "max": "maximum"}

# C++ types, with so many parts of an element, that devices add to in one step.
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


def scatter_source(
    expression: TypedExpression,
    inputs: Sequence[DType | None],
    scalars: Sequence[DType],
    layouts: Layouts,
    reduce: Reduce,
) -> str:
    """Write the source of a kernel ``elementwise`` that stores values at computed places.

    Args:
        expression: Its first result is an element at a place, and the second one the value.
        inputs: Dtypes of its arguments that are arrays; None for those that are scalars.
        scalars: Dtypes of the scalars, in order.
        layouts: Layouts of the arrays that are read element by element.
        reduce: How a value is combined with the element that is there.

    Raises:
        NotSupportedError: An element is too long for that.
    """
    load, value = expression.outputs
    step = expression.steps[load]
    indices = [f"made.x{number}" for number in range(len(step.steps))]
    inside = " & ".join(checks_of(load, expression, indices)) or "true"
    place = place_of(step, expression, indices)
    store = f"if ({inside})\n    combine((char *)({place}), made.x{len(indices)});"
    functions = _combine(expression.steps[value].dtype, reduce)
    return kernel_source(places_of(expression), inputs, scalars, layouts, store, 0, functions)


def _combine(dtype: DType, reduce: Reduce) -> str:
    """C++ of a function that many threads may call for one element."""
    register = register_of(dtype)
    if reduce == "set":
        lines = [f"{element_of(dtype)}::store(at, value);"]
    elif reduce == "add" and dtype in _ADDED:
        kind, parts = _ADDED[dtype]
        lines = [f"atomicAdd(({kind} *)at + {n}, ({kind}){part});" for n, part in enumerate(parts)]
    elif dtype.itemsize > 8:
        raise NotSupportedError(
            f"reduce={reduce!r} of {dtype}: a GPU changes at most 8 bytes in one step; complex64 has it"
        )
    else:
        decode, encode = _BITS.get(dtype, (f"bits_as<{register}>(bits)", "bits_as<Bits>({})"))
        made = encode.format(call_of(_FUNCTIONS[reduce], dtype, (decode, "value")))
        return _SWAPPED.format(
            bits=f"u{8 * dtype.itemsize}",
            word=f"u{8 * max(dtype.itemsize, 4)}",
            register=register,
            made=made,
        )
    return f"FUNCTION void combine(char *at, {register} value) {{ {' '.join(lines)} }}"


# A short element is changed with the word around it.
_SWAPPED = """
typedef {bits} Bits;
typedef {word} Word;
FUNCTION void combine(char *at, {register} value)
{{
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
