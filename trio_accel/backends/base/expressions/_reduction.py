"""Declared reductions: the mapped values, their combination, and the dtypes."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np

from ..contract.dtypes import DType, Strs
from ..contract.foreign_names import instead_of
from ._expression import REDUCTIONS, Name, ParsedExpression, Reduce
from ._parse import COUNT, parse

__all__ = ["WIDER", "accumulated", "parse_reduction"]

_ADDED_UP = ("sum", "prod", "mean")
_ORDERED = ("min", "max", "nanmin", "nanmax", "argmin", "argmax")
# Sums and products of these are made in a wider type, and rounded once. By their names, because to hash a
# dtype of low precision imports ml_dtypes.
WIDER = {
    "float16": DType.float64,
    "bfloat16": DType.float64,
    "float32": DType.float64,
    "complex64": DType.complex128,
}
_RESULT = "out"

Dtypes: TypeAlias = tuple[DType, DType]


def parse_reduction(
    text: str,
    reduce: str,
    *,
    identity: complex | None = None,
    post: str | None = None,
    inputs: tuple[str, ...] | None = None,
    dtype: DType | None = None,
) -> ParsedExpression:
    """Parse the expressions of a reduction with a result that is rounded once.

    Args:
        text: The values to reduce: an expression with one result.
        reduce: One of `REDUCTIONS`, or an expression of ``a`` and ``b`` that combines two values.
        identity: For an expression, the result of no elements; None if there is none.
        post: Last step of the result: an expression of ``a``, and ``n``, the number of reduced elements.
        inputs: Names of the arguments, in order.
        dtype: Dtype that the values are converted to before they are combined; None for NumPy's choice.

    Raises:
        ValueError: An expression is wrong; the message names it, and shows the place.
    """
    mapped = _parsed("map", text, inputs)
    after = None if post is None else _parsed("post", post)
    if after is not None and not set(after.inputs) <= {"a", COUNT}:
        raise ValueError(f"post: reads {', '.join(after.inputs)}; it has a, the result, and n, the count")
    if reduce == "mean" and post is not None:
        raise ValueError("post: mean has its own; write reduce='sum', and a / n in the post")
    name, combine, value = reduce, None, identity
    if reduce in REDUCTIONS:
        if identity is not None:
            raise ValueError(f"identity: {reduce} has its own; give one with an expression only")
    elif reduce.isidentifier():
        raise ValueError(
            f"reduce: there is no {reduce!r}{instead_of(reduce)}; there are {', '.join(REDUCTIONS)}, "
            "or an expression of a and b"
        )
    else:
        name, combine = "expression", _parsed("reduce", reduce)
        if sorted(combine.inputs) != ["a", "b"]:
            raise ValueError(
                f"reduce: must be an expression of a and b, it reads {', '.join(combine.inputs)}"
            )
        value = cast("Any", identity).item() if isinstance(identity, np.generic) else identity
    (output,), location = mapped.outputs, (1, 0)
    reduction = Reduce(name, Name(output, location), location, dtype, combine, value, after, is_result=True)
    # Zeros of both signs are different values.
    options = (reduce, repr(value), post, dtype)
    return ParsedExpression(
        mapped.text,
        mapped.inputs,
        (_RESULT,),
        (*mapped.statements, (f"%{_RESULT}", reduction), (_RESULT, Name(f"%{_RESULT}", location))),
        mapped.elements,
        mapped.loads,
        has_index=False,
        reductions=(reduction,),
        is_along=True,
        options=options,
        margin=mapped.margin,
    )


def _parsed(label: str, text: str, inputs: Strs | None = None) -> ParsedExpression:
    try:
        parsed = parse(text, inputs)
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None
    if len(parsed.outputs) != 1:
        raise ValueError(f"{label}: must have exactly one result, got {', '.join(parsed.outputs)}")
    if parsed.has_index or parsed.loads:
        raise ValueError(f"{label}: has i(axis) or x[...], which only functions of each element have")
    return parsed


def accumulated(name: str, value: DType, *, is_chosen: bool) -> Dtypes:
    """Return the dtype that a reduction converts values to, and the wider dtype that it combines them in.

    Raises:
        TypeError: The values lack an order, although the reduction needs one.
    """
    if name in ("any", "all"):
        return DType.bool, DType.bool
    if name in _ORDERED and value.kind == "complex":
        raise TypeError(f"{name} of {value}: complex numbers cannot be compared")
    if name not in _ADDED_UP:
        return value, value
    if not is_chosen and not value.is_inexact:
        # Short integers would overflow, so NumPy uses the platform's integers, which have 64 bits.
        value = DType.float64 if name == "mean" else DType.uint64 if value.kind == "uint" else DType.int64
    return value, WIDER.get(value.value, value)
