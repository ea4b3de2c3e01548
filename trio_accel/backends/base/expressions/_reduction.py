"""Reductions by expressions: what is mapped, how it is combined, and in which types."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

import attrs
import numpy as np

from ..contract.dtypes import DType, HostArray, Ints, Strs
from ..contract.foreign_names import instead_of
from ..contract.values import by_way_of_int64
from ._evaluate import Overflow, evaluate
from ._expression import Expression
from ._parse import parse
from ._typing import ArgumentType, TypedExpression, Weak, typed
from ._unroll import unrolled

__all__ = [
    "REDUCTIONS", "WIDER", "Reduction", "TypedReduction", "evaluate_reduction", "reduced_groups",
    "typed_reduction",
]  # fmt: skip

ReductionName: TypeAlias = Literal[
    "sum", "prod", "mean", "min", "max", "nanmin", "nanmax", "any", "all", "argmin", "argmax", "expression"
]

REDUCTIONS: Strs = get_args(ReductionName)[:-1]
"""Reductions that have names."""

_IDENTITIES: dict[str, complex] = {"sum": 0, "prod": 1, "mean": 0, "any": False, "all": True}
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
_MOST_ROUNDS = 4
COMBINED: dict[str, str] = {
    "sum": "add", "prod": "multiply", "mean": "add", "min": "minimum", "max": "maximum", "nanmin": "fmin",
    "nanmax": "fmax", "any": "logical_or", "all": "logical_and",
}  # fmt: skip
"""The function that combines two values, by the name of the reduction."""
# Elements that are mapped at a time.
_PIECE = 1 << 18


@attrs.frozen
class Reduction:
    """A reduction as it is declared.

    Attributes:
        map: The values to reduce: an expression with one result.
        name: One of `REDUCTIONS`, or ``"expression"``.
        combine: For ``"expression"``, an expression of ``a`` and ``b``.
        identity: For ``"expression"``, the result of no elements; None if there is none.
        post: Last step of the result: an expression of ``a``, and ``n``, how many elements were reduced.
    """

    map: Expression
    name: ReductionName
    combine: Expression | None = None
    identity: complex | None = None
    post: Expression | None = None

    @staticmethod
    def parse(
        text: str,
        reduce: str,
        *,
        identity: complex | None = None,
        post: str | None = None,
        inputs: tuple[str, ...] | None = None,
    ) -> Reduction:
        """Parse its expressions.

        Raises:
            ValueError: One of them is wrong; the message says which, and shows where.
        """
        mapped = _parsed("map", text, inputs)
        after = None if post is None else _parsed("post", post)
        if after is not None and not set(after.inputs) <= {"a", "n"}:
            raise ValueError(f"post: reads {', '.join(after.inputs)}; it has a, the result, and n, the count")
        if reduce == "mean":
            if post is not None:
                raise ValueError("post: mean has its own; write reduce='sum', and a / n in the post")
            after = parse("a / n")
        if reduce in REDUCTIONS:
            if identity is not None:
                raise ValueError(f"identity: {reduce} has its own; give one with an expression only")
            return Reduction(mapped, reduce, post=after)  # type: ignore[arg-type]  # one of the names
        if reduce.isidentifier():
            raise ValueError(
                f"reduce: there is no {reduce!r}{instead_of(reduce)}; there are {', '.join(REDUCTIONS)}, "
                "or an expression of a and b"
            )
        combine = _parsed("reduce", reduce)
        if sorted(combine.inputs) != ["a", "b"]:
            raise ValueError(
                f"reduce: must be an expression of a and b, it reads {', '.join(combine.inputs)}"
            )
        value = cast("Any", identity).item() if isinstance(identity, np.generic) else identity
        return Reduction(mapped, "expression", combine, value, after)

    @property
    def takes_nothing(self) -> bool:
        """Whether there is a result of no elements."""
        return self.name in _IDENTITIES or self.identity is not None

    @property
    def is_index(self) -> bool:
        """Whether the result is the number of an element."""
        return self.name in ("argmin", "argmax")


def _parsed(what: str, text: str, inputs: Strs | None = None) -> Expression:
    try:
        parsed = parse(text, inputs)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    if len(parsed.outputs) != 1:
        raise ValueError(f"{what}: must have one result, it has {', '.join(parsed.outputs)}")
    if parsed.has_index or parsed.loads:
        raise ValueError(f"{what}: has i(axis) or x[...], which only functions of each element have")
    return parsed


@attrs.frozen
class TypedReduction:
    """A reduction of arguments of certain types.

    Attributes:
        reduction: The declared reduction.
        map: Makes a value of `reduced` of each element.
        accumulator: Type that the values are converted to and combined in.
        combine: Of an expression: makes one value of two, both of `accumulator`.
        reduced: Type that the combined value is converted to: with a `post` that of `accumulator`, so that
            the result is rounded once.
        post: Of the converted value, and of the count, makes the result; None for nothing.
        dtype: Type of the result.
    """

    reduction: Reduction
    map: TypedExpression
    accumulator: DType
    combine: TypedExpression | None
    reduced: DType
    post: TypedExpression | None
    dtype: DType


@functools.lru_cache(1024)
def typed_reduction(
    reduction: Reduction,
    arguments: tuple[ArgumentType, ...],
    dtype: DType | None = None,
    result: DType | None = None,
) -> TypedReduction:
    """Find the types of a reduction, as NumPy's functions of these names have them.

    Args:
        reduction: The reduction.
        arguments: Types of the inputs of `Reduction.map`.
        dtype: Type that the values are converted to before they are combined; None for NumPy's choice.
        result: Type that the result is converted to; None for no conversion.

    Raises:
        TypeError: There is no such reduction of these types.
        NotSupportedError, ValueError: See `typed`.
    """
    (value,) = typed(reduction.map, arguments).dtypes
    chosen = value if dtype is None else dtype
    combine: TypedExpression | None = None
    reduced = accumulator = _accumulated(reduction.name, chosen, is_chosen=dtype is not None)
    if reduction.name in _ADDED_UP:
        accumulator = WIDER.get(reduced.value, reduced)
    if reduction.combine is not None:
        combine = _combined(reduction.combine, chosen, is_chosen=dtype is not None)
        (reduced,) = (accumulator,) = combine.dtypes
    mapped = unrolled(typed(reduction.map, arguments, (reduced,)))
    final = DType.int64 if reduction.is_index else reduced
    after = None
    if reduction.post is not None or result is not None:
        post = parse("a") if reduction.post is None else reduction.post
        kinds: dict[str, ArgumentType] = {"a": final, "n": Weak.int}
        (found,) = typed(post, tuple(kinds[name] for name in post.inputs), (result,)).dtypes
        if not reduction.is_index:
            kinds["a"] = final = accumulator
        after = typed(post, tuple(kinds[name] for name in post.inputs), (found,))
    return TypedReduction(
        reduction, mapped, accumulator, combine, final, after, final if after is None else after.dtypes[0]
    )


def _accumulated(name: str, value: DType, *, is_chosen: bool) -> DType:
    """Return the type that values are combined to, before it is widened."""
    if name in ("any", "all"):
        return DType.bool
    if name in _ORDERED and value.kind == "complex":
        raise TypeError(f"{name} of {value}: complex numbers have no order")
    if name in _ADDED_UP and not is_chosen and not value.is_inexact:
        # Short whole numbers would overflow: NumPy takes the platform's, which is 64 bits.
        return DType.float64 if name == "mean" else DType.uint64 if value.kind == "uint" else DType.int64
    return value


def _combined(combine: Expression, value: DType, *, is_chosen: bool) -> TypedExpression:
    """Type an expression of ``a`` and ``b`` so that its result has the type of its arguments."""
    for _ in range(_MOST_ROUNDS):
        found = typed(combine, (value, value))
        (result,) = found.dtypes
        if result is value:
            return found
        if is_chosen:
            return typed(combine, (value, value), (value,))
        value = result
    raise TypeError(
        f"reduce: the result of {combine.text!r} is never of the type that it takes; give a dtype"
    )


def evaluate_reduction(
    reduction: TypedReduction,
    arguments: Sequence[Any],
    shape: Ints,
    axes: Ints,
    overflow: Overflow = "ignore",
) -> HostArray:
    """Compute a reduction by NumPy; the axes that are reduced go.

    Args:
        reduction: The typed reduction.
        arguments: Arrays and NumPy scalars of its types, which broadcast to `shape`.
        shape: Extents before the reduction.
        axes: Which axes, from 0 on, in order.
        overflow: What is done when a step over- or underflows.
    """
    with np.errstate(divide="ignore", invalid="ignore", over=overflow, under=overflow):
        name = COMBINED.get(reduction.reduction.name)
        if name is not None:
            result = _by_ufunc(reduction, getattr(np, name), arguments, shape, axes, overflow)
        else:
            (values,) = evaluate(reduction.map, arguments)
            result = _combine(reduction, np.broadcast_to(values, shape), axes)
        kind = reduction.reduced.dtype
        result = by_way_of_int64(result, kind).astype(kind)
    if reduction.post is None:
        return result
    post = reduction.reduction.post
    given = {"a": result, "n": np.int64(math.prod(shape[axis] for axis in axes))}
    (finished,) = evaluate(reduction.post, [given[name] for name in (post.inputs if post else ("a",))])
    return np.broadcast_to(finished, result.shape)


def _by_ufunc(
    reduction: TypedReduction,
    ufunc: Any,
    arguments: Sequence[Any],
    shape: Ints,
    axes: Ints,
    overflow: Overflow,
) -> HostArray:
    """Reduce pieces that fit into the caches, in the order of NumPy for one array of all values."""
    dtype = reduction.accumulator.dtype
    step = reduction.map.steps[reduction.map.outputs[0]]
    is_there = step.function == "argument" and step.dtype is reduction.accumulator
    groups, order = reduced_groups(shape, axes, [np.asarray(each).strides for each in arguments])
    # Others than sums of rows are made element behind element, also where other axes are between.
    many = sum(is_reduced for _, is_reduced in groups)
    is_simple = many == 1 or (many and groups[-1][1] and ufunc is np.add)
    if math.prod(shape) <= _PIECE or is_there or not is_simple:
        whole = _mapped(reduction, arguments, shape, overflow)
        return np.asarray(ufunc.reduce(whole, axis=axes, dtype=dtype))
    *outer, (extent, is_row) = groups
    three = math.prod(extent for extent, _ in outer), extent, 1
    if not is_row:
        three = outer[0][0] if len(outer) > 1 else 1, outer[-1][0], extent
    # Neighbours become one axis, for which an argument is copied only if it is broadcast along some of them.
    given = [
        np.broadcast_to(each, shape).transpose(order).reshape(three) if np.ndim(each) else each
        for each in arguments
    ]

    def part(rows: slice, elements: slice) -> HostArray:
        here = [each[rows, elements] if np.ndim(each) else each for each in given]
        extents = rows.stop - rows.start, elements.stop - elements.start, three[2]
        return _mapped(reduction, here, extents, overflow)

    made = _in_pieces(part, ufunc, three)
    if is_row:
        made = made.reshape([extent for extent, _ in outer])
        left = tuple(number for number, (_, is_reduced) in enumerate(outer) if is_reduced)
        made = np.asarray(ufunc.reduce(made, axis=left, dtype=dtype)) if left else made
    kept = [axis for axis in order if axis not in axes]
    return made.reshape([shape[axis] for axis in kept]).transpose(np.argsort(kept))


def reduced_groups(
    shape: Ints, axes: Sequence[int], strides: Sequence[Ints]
) -> tuple[list[tuple[int, bool]], list[int]]:
    """Find in which order NumPy reduces an array that it made of others.

    Args:
        shape: Extents.
        axes: Which are reduced.
        strides: Those of the others; the first one with all axes counts.

    Returns:
        Extents of neighbouring axes that are all reduced, or all kept, and which; and the order of axes.
    """
    order = list(range(len(shape)))
    steps = next((each for each in strides if len(each) == len(shape)), ())
    if all(steps[axis] or shape[axis] == 1 for axis in order[: len(steps)]):
        # NumPy's result lies as the arrays that it is made of.
        order.sort(key=lambda axis: -abs(steps[axis]) if steps else 0)
    groups = list[tuple[int, bool]]()
    for axis in order:
        if shape[axis] == 1:
            continue
        is_reduced = axis in axes
        if groups and groups[-1][1] == is_reduced:
            groups[-1] = groups[-1][0] * shape[axis], is_reduced
        else:
            groups.append((shape[axis], is_reduced))
    return groups, order


def _mapped(
    reduction: TypedReduction, arguments: Sequence[Any], shape: Ints, overflow: Overflow
) -> HostArray:
    (values,) = evaluate(reduction.map, arguments, overflow=overflow)
    return np.broadcast_to(values.astype(reduction.accumulator.dtype, copy=False), shape)


def _in_pieces(
    part: Callable[[slice, slice], HostArray], ufunc: Any, shape: tuple[int, int, int]
) -> HostArray:
    """Reduce the middle one of three axes of values, of which `part` makes some rows, and some elements."""
    lead, count, tail = shape
    many, step = max(_PIECE // (count * tail), 1), max(_PIECE // tail, 1)

    def reduced(rows: slice, first: int, stop: int) -> Any:
        if ufunc is np.add and tail == 1 and stop - first > _PIECE:
            # Sums are those of halves.
            middle = first + (stop - first) // 2 - (stop - first) // 2 % 8
            return reduced(rows, first, middle) + reduced(rows, middle, stop)
        found: HostArray | None = None
        for start in range(first, stop, step):
            values = part(rows, slice(start, min(start + step, stop)))
            if found is not None:
                values = np.concatenate([found, values], axis=1)
            found = ufunc.reduce(values, axis=1, dtype=values.dtype, keepdims=True)
        return found

    return np.concatenate(
        [reduced(slice(row, min(row + many, lead)), 0, count) for row in range(0, lead, many)]
    )


def _combine(reduction: TypedReduction, values: HostArray, axes: Ints) -> HostArray:
    name = reduction.reduction.name
    kept = [axis for axis in range(values.ndim) if axis not in axes]
    ahead = values.transpose(*axes, *kept)
    flat = ahead.reshape(
        math.prod(values.shape[axis] for axis in axes), *(values.shape[each] for each in kept)
    )
    if name == "expression":
        return _halved(reduction, flat)
    find: Callable[..., Any] = np.argmin if name == "argmin" else np.argmax
    return np.asarray(find(flat, axis=0))


def _halved(reduction: TypedReduction, values: HostArray) -> HostArray:
    """Combine along the first axis, pair by pair."""
    assert reduction.combine is not None
    if not len(values):
        return np.full(values.shape[1:], np.asarray(reduction.reduction.identity).astype(values.dtype))
    names = reduction.reduction.combine.inputs if reduction.reduction.combine else ()
    while len(values) > 1:
        half = len(values) // 2
        pair = {"a": values[:half], "b": values[half : 2 * half]}
        (made,) = evaluate(reduction.combine, [pair[name] for name in names])
        made = np.broadcast_to(made, pair["a"].shape)
        values = np.concatenate([made, values[2 * half :]]) if len(values) % 2 else made
    result: HostArray = np.asarray(values[0])
    return result
