"""Expressions of the user's own: computed for each element, or reduced along axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack, overload

from ..backends.base import DTypeLike
from ..devices import AccelRef
from ..expressions import Elementwise, Reduction

__all__ = ["elementwise", "reduction"]

_LIBRARY = "trio_accel.jit:JitActor"


class _ExpressionOptions(TypedDict, total=False):
    """The options of an expression with one output and with several."""

    inputs: Sequence[str] | None
    dtypes: DTypeLike | Mapping[str, DTypeLike] | None
    name: str
    slopes: Mapping[str, str] | None


@overload
def elementwise(
    text: str, *, outputs: None = ..., **options: Unpack[_ExpressionOptions]
) -> Elementwise[AccelRef]: ...
@overload
def elementwise(
    text: str, *, outputs: Sequence[str], **options: Unpack[_ExpressionOptions]
) -> Elementwise[tuple[AccelRef, ...]]: ...
def elementwise(
    text: str,
    *,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    dtypes: DTypeLike | Mapping[str, DTypeLike] | None = None,
    name: str = "elementwise",
    slopes: Mapping[str, str] | None = None,
) -> Elementwise[AccelRef] | Elementwise[tuple[AccelRef, ...]]:
    """Make a function of arrays from an expression, as `cupy.ElementwiseKernel` does.

    The expression is a small part of Python: arithmetic, comparisons, ``and``, ``or``, ``not``, bitwise
    operators, ``a if condition else b``, and functions of NumPy by their names, such as ``sqrt``, ``where``,
    ``maximum`` and ``float32``. ``i(axis)`` is the index of the element along an axis of the result, and
    ``x[...]`` an element of an argument at computed indices. ``sum(x[k] for k in range(a, b))`` reduces over
    a range, as do ``prod``, ``min``, ``max``, ``any`` and ``all``. ``for k in range(n)`` is a loop of
    assignments, which ``if condition: break`` ends. ``vector(x, y, z)`` has components, ``dot``, ``cross``,
    ``length`` and ``normalize``. Types are NumPy's (NEP 50). It is parsed, and never run by Python: other
    calls, attributes and slices are refused.

    >>> import trio_accel as ta
    >>> ta.jit.elementwise("d = x - mean; y = d * d / variance")
    <Elementwise jit.elementwise(x, mean, variance) -> y>
    >>> ta.jit.elementwise("s = sin(x); c = cos(x)", outputs=("s", "c"))
    <Elementwise jit.elementwise(x) -> s, c>
    >>> ta.jit.elementwise("x[i(0), -1 - i(1)]", name="flip")
    <Elementwise jit.flip(x) -> out>
    >>> ta.jit.elementwise("sum(w[k] * x[i(0) + k] for k in range(n))", name="correlate")
    <Elementwise jit.correlate(w, x, n) -> out>

    Args:
        text: Assignments and loops with ``;`` or new lines between them, or one expression, whose result is
            ``out``.
        inputs: Names of the arguments, in order; by default in the order in which the source names them.
        outputs: Names of the results, in order; then a call returns a tuple. By default there is one result:
            the name that is assigned and not read later.
        dtypes: Types that the results are converted to: one for all, or by their names; by default NumPy's.
        name: Name of the operation, for statistics, traces and errors.
        slopes: Gradients written by hand, by the names of inputs: sources that read `g`, the gradient of the
            result, the inputs, and the result by its name, such as ``{"x": "g * y"}``. `grad` derives the
            gradients of other inputs.

    Raises:
        ValueError: The expression contains something that is not allowed, and the message shows the place;
            results are not named by `outputs`; `slopes` names something else than an input; or an input is
            called `g`.
        TypeError: Devices lack this dtype, or `slopes` is not a dict of texts.
    """
    expression: Elementwise[Any] = Elementwise(
        text,
        inputs=inputs,
        outputs=outputs,
        dtypes=dtypes,
        operation=_operation(name),
        library=_LIBRARY,
        slopes=slopes,
    )
    return expression


def reduction(
    text: str,
    reduce: str = "sum",
    *,
    post: str | None = None,
    identity: complex | None = None,
    inputs: Sequence[str] | None = None,
    dtype: DTypeLike | None = None,
    name: str = "reduction",
) -> Reduction:
    """Make a reduction of arrays from expressions, as `cupy.ReductionKernel` does.

    >>> import trio_accel as ta
    >>> ta.jit.reduction("x * y", "sum", name="dot")
    <Reduction jit.dot(x, y): sum of x * y>
    >>> ta.jit.reduction("x * x", "sum", post="sqrt(a / n)", name="rms")
    <Reduction jit.rms(x): sum of x * x>
    >>> ta.jit.reduction("abs(x)", "a if a > b else b", identity=0)
    <Reduction jit.reduction(x): a if a > b else b of abs(x)>

    Args:
        text: The values to reduce: an expression of the arguments, as in `elementwise`, with one result.
        reduce: ``"sum"``, ``"prod"``, ``"mean"``, ``"min"``, ``"max"``, ``"any"``, ``"all"``, ``"argmin"``,
            ``"argmax"``; or an expression of ``a`` and ``b`` that combines two values. It must be associative
            and commutative, because values are combined in any order.
        post: Last step of the result, before it is rounded: an expression of ``a``, and of ``n``, the number
            of reduced elements. Not allowed for a mean.
        identity: With an expression: the result of no elements.
        inputs: Names of the arguments, in order; by default in the order in which the source names them.
        dtype: Type that values are converted to before they are combined; by default NumPy's choice: sums and
            products of integers have 64 bits.
        name: Name of the operation, for statistics, traces and errors.

    Raises:
        ValueError: The expression contains something that is not allowed; the message shows the place.
        TypeError: Devices lack this dtype.
    """
    return Reduction(
        text,
        reduce,
        post=post,
        identity=identity,
        inputs=inputs,
        dtype=dtype,
        operation=_operation(name),
        library=_LIBRARY,
    )


def _operation(name: str) -> str:
    if not name.isidentifier():
        raise ValueError(f"name: must be an identifier, got {name!r}")
    return f"jit.{name}"
