"""Reductions, permutations and combinations of tensors, by letters of their axes, as expressions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, TypeAlias

from ..backends.base import DType, element, factor
from ..devices import AccelRef, Operand, composed
from ..expressions import ContractionFactor, Elementwise, Out, Reduction, check_operands, factors_of

__all__ = ["elementwise", "permute", "reduce"]

Operator: TypeAlias = Literal["add", "max", "min", "multiply"]
"""How two elements become one: those of cuTENSOR."""

# Expressions are kept by their texts.
_expression = functools.cache(Elementwise[AccelRef])
_reduction = functools.cache(functools.partial(Reduction, operation="tensor.reduce"))

_REDUCTIONS = {"add": "sum", "max": "max", "min": "min", "multiply": "prod"}
_TEXTS = {
    "add": "({} + {})",
    "max": "maximum({}, {})",
    "min": "minimum({}, {})",
    "multiply": "({} * {})",
}


@composed
async def reduce(subscripts: str, a: Operand, /, *, op: Operator = "add", out: Out = None) -> AccelRef:
    """Reduce the axes that the result lacks: ``reduce("ijk->ki", a)``, as cuTENSOR's ``reduce``.

    One launch. Sums and products of float16, bfloat16 and float32 are made in float64 and rounded once.

    Args:
        subscripts: Letters for the axes of `a` and of the result. A letter twice takes the diagonal.
        a: Tensor.
        op: ``"add"``, ``"multiply"``, ``"min"`` or ``"max"``.
        out: Array to write to; by default a new one.

    Returns:
        The result, with the dtype of `a`, and its axes in the order of the letters.

    Raises:
        ValueError: The least or the greatest of no elements.
    """
    read, output = _read("reduce", subscripts, a)
    _check_operator("reduce", op)
    inner = [label for label in read.labels if str(label) not in output]
    if not inner:
        return await _combined("reduce", [read.along(output)], [1], [], out)
    dtype = None if op in ("max", "min") else DType.of(a.dtype).value
    combine = _reduction("x", _REDUCTIONS[op], dtype=dtype)
    axes = range(len(output), len(output) + len(inner))
    return await combine(read.along((*output, *inner)), axis=axes, out=out)


@composed
async def permute(subscripts: str, a: Operand, /, *, alpha: complex = 1, out: Out = None) -> AccelRef:
    """Copy a tensor with its axes in another order: ``permute("ijk->kij", a)``, as cuTENSOR's ``permute``.

    One launch. `ta.arrays.permute_dims` makes a view instead.

    Args:
        subscripts: Letters for the axes of `a` and of the result, which are the same.
        a: Tensor.
        alpha: Factor of the elements.
        out: Array to write to; by default a new one without gaps.

    Returns:
        The copy.
    """
    read, output = _read("permute", subscripts, a)
    if set(output) != set(read.labels):
        raise ValueError(f"permute: subscripts {subscripts!r}: both sides must have the same letters")
    view = read.along(output)
    alpha = _scale("permute", "alpha", alpha, DType.of(a.dtype))
    if alpha == 1 and out is None and isinstance(view, AccelRef):
        return await view.copy()
    return await _combined("permute", [view], [alpha], [], out)


@composed
async def elementwise(
    subscripts: str,
    /,
    *operands: Operand,
    op: Operator | Sequence[Operator] = "add",
    factors: Sequence[complex] | None = None,
    out: Out = None,
) -> AccelRef:
    """Combine the elements of two or more tensors, as cuTENSOR's ``elementwise_binary`` and ``_trinary``.

    ``elementwise("ij,ji->ij", a, b, factors=(1, -1))`` is ``a - b.T``. One launch. `ta.jit.elementwise` takes
    any expression, and broadcasts by NumPy's rules instead of letters.

    Args:
        subscripts: Letters for the axes of each tensor and of the result. A tensor broadcasts along letters
            that it lacks.
        *operands: Tensors of one dtype.
        op: ``"add"``, ``"multiply"``, ``"min"`` or ``"max"``; or several of them, one between each two
            tensors, which are combined from the left.
        factors: Factors of the tensors; by default 1.
        out: Array to write to; by default a new one.

    Returns:
        The result, with the dtype of the tensors.

    Raises:
        ValueError: Also a letter that the result has not, and numbers of operators or factors that do not
            fit.
    """
    name = "elementwise"
    dtype = check_operands(
        name, **{f"operands[{number}]": operand for number, operand in enumerate(operands)}
    )
    read, output, _ = factors_of(name, subscripts, operands)
    count = len(operands)
    ops = [op] * (count - 1) if isinstance(op, str) else [*op]
    scales = [1] * count if factors is None else [*factors]
    if len(ops) != count - 1 or len(scales) != count:
        raise ValueError(
            f"{name}: {count} tensors have {count - 1} operators and {count} factors, got op={op!r} and "
            f"factors={factors!r}"
        )
    for op_name in ops:
        _check_operator(name, op_name)
    scales = [_scale(name, f"factors[{n}]", scale, dtype) for n, scale in enumerate(scales)]
    extra_labels = sorted({str(label) for tensor in read for label in tensor.labels} - set(output))
    if extra_labels:
        raise ValueError(
            f"{name}: subscripts {subscripts!r}: the result has not {extra_labels[0]!r}: reduce it"
        )
    return await _combined(name, [tensor.along(output) for tensor in read], scales, ops, out)


async def _combined(
    name: str, views: Sequence[Operand], scales: Sequence[complex], ops: Sequence[str], out: Out
) -> AccelRef:
    """Combine views of one shape from the left; low precision is rounded once."""
    # The name of each tensor, by its number, with its factor.
    text, *terms = (f"x{n}" if scale == 1 else f"p{n} * x{n}" for n, scale in enumerate(scales))
    for op_name, term in zip(ops, terms, strict=True):
        text = _TEXTS[op_name].format(text, term)
    arguments: list[Operand | complex] = []
    for view, scale in zip(views, scales, strict=True):
        arguments += [view] if scale == 1 else [scale, view]
    # Integers stay what they are.
    precision = "float32" if DType.of(views[0].dtype).is_inexact else None
    combine = _expression(f"out = {text}", operation=f"tensor.{name}", precision=precision)
    return await combine(*arguments, out=out)


def _read(name: str, subscripts: str, a: Operand) -> tuple[ContractionFactor, str]:
    check_operands(name, a=a)
    (factor,), output, _ = factors_of(name, subscripts, [a], "a")
    return factor, output


def _check_operator(name: str, op: object) -> None:
    if not isinstance(op, str) or op not in _TEXTS:
        raise ValueError(f"{name}: op must be one of {tuple(_TEXTS)}, got {op!r}")


def _scale(name: str, argument: str, value: complex, dtype: DType) -> complex:
    """Require a factor that leaves the dtype as it is; of truth values there is none but 1."""
    if dtype.kind in ("int", "uint"):
        return element(name, argument, value, dtype)
    return value if dtype is DType.bool and value == 1 else factor(name, argument, value, dtype)
