"""Gradients of array functions other than element-wise expressions."""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial, reduce
from typing import Any

import numpy as np

from .. import arrays as _arrays
from ..backends.base import NotSupportedError
from ._backward import RULES, Make, bound, is_operand, pulled
from ._elementwise import ADVICE, Rule, summed_to
from ._rows import of_real

__all__ = [
    "adjoint",
    "axes_of",
    "axis_of",
    "composition",
    "conjugate",
    "filled",
    "order_of",
    "part",
    "products_before",
    "spread",
    "total_of",
    "transposed",
    "unpadded",
]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays


def axis_of(args: dict[str, Any], x: Any) -> int:
    """Return the argument `axis` as an axis from 0; for None the axis of an array that was flattened."""
    return 0 if args["axis"] is None else args["axis"] % len(x.shape)


def axes_of(axis: Any, x: Any) -> tuple[int, ...]:
    """Return the argument `axis` as axes from 0; None means all."""
    count = len(x.shape)
    return tuple(range(count)) if axis is None else tuple(int(dim) % count for dim in np.atleast_1d(axis))


def spread(g: Any, x: Any, axes: Sequence[int]) -> Any:
    """Return the gradient of a reduction in the shape of its argument."""
    shape = tuple(1 if axis in axes else extent for axis, extent in enumerate(x.shape))
    return arrays.broadcast_to(arrays.reshape(g, shape), x.shape)


def conjugate(x: Any) -> Any:
    """Return the conjugate of complex numbers, and others as they are."""
    if isinstance(x, (int, float, complex)):
        return x.conjugate()
    if x.dtype.kind not in ("complex", "c"):
        return x
    return x.conj() if isinstance(x, np.ndarray) else arrays.conj(x)


def adjoint(x: Any) -> Any:
    """Return the conjugate transposes of matrices."""
    return conjugate(x).mT


def composition(f: Callable[..., Any], *, without: Collection[str] = ()) -> Make:
    """Make a rule from a composition of calls with the same arguments and result as a function.

    Args:
        f: The composition.
        without: Names of arguments that it does not take, because they follow from the others.

    Returns:
        The rule. Its attribute ``value`` composes the result of a call, with host arrays put on the device of
        an array.
    """

    def args_of(call: Any, like: Any) -> dict[str, Any]:
        bound_args = bound(call, like)
        return {name: argument for name, argument in bound_args.items() if name not in without}

    def compose(args: dict[str, Any], *leaves: Any) -> Any:
        remaining = iter(leaves)
        return f(**{name: _replaced(argument, remaining) for name, argument in args.items()})

    def value(call: Any, like: Any) -> Any:
        args = args_of(call, like)
        return compose(args, *_operands(list(args.values())))

    def rule(call: Any, g: Any) -> Iterator[Rule]:
        args = args_of(call, call)
        for name in without:
            yield bound(call)[name], lambda: None
        operands = list(_operands(list(args.values())))
        slopes = cache(lambda: pulled(partial(compose, args), operands, g))
        for index, operand in enumerate(operands):
            yield operand, partial(_nth, slopes, index)

    rule_with_value: Any = rule
    rule_with_value.value = value
    return rule


def _conjugated(make: Callable[[], Any]) -> Any:
    return arrays.conj(make())


def transposed(rule: Make) -> Make:
    """Make a rule from one that multiplies a gradient by the transpose of a matrix.

    Of complex numbers the gradient is by the conjugate transpose, and constants such as weights may be
    complex.
    """

    def conjugated(call: Any, g: Any) -> Iterator[Rule]:
        if g.dtype.kind != "complex":
            yield from rule(call, g)
            return
        turned = arrays.conj(g)
        # A caller may only need the gradients of some operands.
        turned.silence()
        for operand, make in rule(call, turned):
            yield operand, partial(_conjugated, make)

    return conjugated


def _operands(argument: Any) -> Iterator[Any]:
    """Yield the operands of an argument, which may be a list or tuple of them."""
    if isinstance(argument, (list, tuple)):
        for part_of_it in argument:
            yield from _operands(part_of_it)
    elif is_operand(argument):
        yield argument


def _replaced(argument: Any, leaves: Iterator[Any]) -> Any:
    """Return an argument with each operand replaced by the next leaf."""
    if isinstance(argument, (list, tuple)):
        return [_replaced(part_of_it, leaves) for part_of_it in argument]
    return next(leaves) if is_operand(argument) else argument


def _nth(make: Callable[[], Sequence[Any]], index: int) -> Any:
    return make()[index]


# Reductions.


def _reduced(call: Any) -> tuple[dict[str, Any], Any, tuple[int, ...]]:
    """Return the arguments of a reduction, its array and its axes."""
    args = bound(call)
    return args, args["x"], axes_of(args["axis"], args["x"])


def _sum(call: Any, g: Any) -> Iterator[Rule]:
    _, x, axes = _reduced(call)
    yield x, lambda: spread(g, x, axes)


def _count(x: Any, axes: Sequence[int]) -> int:
    return math.prod(x.shape[axis] for axis in axes)


def _mean(call: Any, g: Any) -> Iterator[Rule]:
    _, x, axes = _reduced(call)
    yield x, lambda: spread(g, x, axes) * (1 / (_count(x, axes) or math.nan))


def _extreme(call: Any, g: Any) -> Iterator[Rule]:
    """Equal elements share the gradient."""
    _, x, axes = _reduced(call)

    def slope() -> Any:
        same = arrays.where(x == spread(call, x, axes), 1.0, 0.0)
        ties = arrays.sum(same, axis=axes)
        return arrays.where(same > 0, spread(arrays.reshape(g, ties.shape) / ties, x, axes), 0)

    yield x, slope


def products_before(x: Any, axis: int) -> Any:
    """Return the product of all elements before each one along an axis."""
    ones = part(arrays.ones_like(x), axis, slice(0, 1))
    return arrays.concat([ones, arrays.cumulative_prod(part(x, axis, slice(0, -1)), axis=axis)], axis=axis)


def _prod(call: Any, g: Any) -> Iterator[Rule]:
    """The derivative of a product by a factor is the product of the others: before it, and after it."""
    _, x, axes = _reduced(call)

    def slope() -> Any:
        free = [axis for axis in range(len(x.shape)) if axis not in axes]
        order = (*free, *axes)
        turned = arrays.permute_dims(conjugate(x), order)
        rows = arrays.reshape(turned, (*turned.shape[: len(free)], _count(x, axes)))
        axis = len(free)
        after = arrays.flip(products_before(arrays.flip(rows, axis=axis), axis), axis=axis)
        products = arrays.reshape(products_before(rows, axis) * after, turned.shape)
        back = tuple(order.index(axis) for axis in range(len(order)))
        return spread(g, x, axes) * arrays.permute_dims(products, back)

    yield x, slope


def _var(call: Any, g: Any) -> Iterator[Rule]:
    args, x, axes = _reduced(call)

    def slope() -> Any:
        off = x - arrays.mean(x, axis=axes, keepdims=True)
        return spread(g, x, axes) * off * (2 / ((_count(x, axes) - args["correction"]) or math.nan))

    yield x, slope


def _std(call: Any, g: Any) -> Iterator[Rule]:
    # Equal elements have the gradient 0, as in PyTorch.
    yield from _var(call, 0.5 * g / arrays.where(call == 0, math.inf, call))


def _logsumexp(call: Any, g: Any) -> Iterator[Rule]:
    _, x, axes = _reduced(call)
    yield x, lambda: spread(g, x, axes) * arrays.softmax(x, axis=axes)


def _nanstd(call: Any, g: Any) -> Iterator[Rule]:
    args, x, axes = _reduced(call)
    how = {"axis": axes, "correction": args["correction"], "keepdims": args["keepdims"]}
    # Equal elements have the gradient 0, as in the rule of `std`.
    variance = partial(arrays.nanvar, **how)
    yield x, lambda: pulled(variance, [x], 0.5 * g / arrays.where(call == 0, math.inf, call))[0]


def _nanprod(x: Any, axis: Any, keepdims: bool, **_: Any) -> Any:
    return arrays.prod(arrays.where(arrays.isnan(x), 1, x), axis=axis, keepdims=keepdims)


# Other shapes, and parts.


def _reshaped(call: Any, g: Any) -> Iterator[Rule]:
    yield call.args[0], lambda: arrays.reshape(g, call.args[0].shape)


def order_of(call: Any) -> tuple[int, ...]:
    """Return the axis of an array for each axis of its view; NumPy finds where each axis moves."""
    x, name = call.args[0], call.function.name.rpartition(".")[2]
    tags = np.empty(tuple(range(2, 2 + len(x.shape))), np.int8)
    if name in ("T", "mT"):
        turned = getattr(tags, name)
    elif name == "transpose":
        turned = tags.transpose(*call.args[1:])
    else:
        turned = getattr(np, name)(tags, *call.args[1:], **dict(call.named or {}))
    return tuple([extent - 2 for extent in turned.shape])


def _turned(call: Any, g: Any) -> Iterator[Rule]:
    """Yield gradients of functions that move axes."""
    order = order_of(call)
    yield call.args[0], lambda: arrays.permute_dims(g, tuple(map(order.index, range(len(order)))))


def _taken(call: Any, g: Any) -> Iterator[Rule]:
    """Gradients of a part by numbers and slices: zeros around, and between."""
    x, key = call.args
    keys: list[Any] = [index for index in np.index_exp[key] if index is not None]
    if Ellipsis in keys:
        position = keys.index(Ellipsis)
        keys[position : position + 1] = [slice(None)] * (len(x.shape) - len(keys) + 1)
    keys += [slice(None)] * (len(x.shape) - len(keys))
    spans: list[range] = []
    for index, extent in zip(keys, x.shape, strict=False):
        if not isinstance(index, (int, slice)):
            raise NotSupportedError(f"only parts by numbers and slices have gradients; {ADVICE}")
        spans.append(
            range(extent)[index if isinstance(index, slice) else slice(index % extent, index % extent + 1)]
        )
    yield x, lambda: _placed(arrays.reshape(g, tuple(map(len, spans))), x.shape, spans)


def _placed(g: Any, shape: Sequence[int], spans: Sequence[range]) -> Any:
    """Return zeros of a shape, with values at the indices of spans."""
    if not spans:
        # `pad` has no widths for a 0-d array.
        return g
    backwards = [axis for axis, span in enumerate(spans) if span.step < 0]
    if backwards:
        g = arrays.flip(g, axis=tuple(backwards))
        spans = [span[::-1] if span.step < 0 else span for span in spans]
    for axis, span in enumerate(spans):
        if span.step > 1 and len(span) > 1:
            # Zeros follow each element, but the last.
            widths = [(0, 0)] * (axis + 1) + [(0, span.step - 1)] + [(0, 0)] * (len(shape) - axis - 1)
            apart = (*g.shape[: axis + 1], 1, *g.shape[axis + 1 :])
            wide = arrays.pad(arrays.reshape(g, apart), widths)
            merged = (*g.shape[:axis], len(span) * span.step, *g.shape[axis + 1 :])
            stop = (len(span) - 1) * span.step + 1
            g = arrays.reshape(wide, merged)[(slice(None),) * axis + (slice(0, stop),)]
    # An empty part has its zeros anywhere.
    starts = [span.start if len(span) else 0 for span in spans]
    ends = [span[-1] + 1 if len(span) else 0 for span in spans]
    return arrays.pad(
        g, [(start, extent - end) for start, end, extent in zip(starts, ends, shape, strict=True)]
    )


def _broadcast(call: Any, g: Any) -> Iterator[Rule]:
    yield call.args[0], lambda: summed_to(g, call.args[0].shape)


def total_of(terms: Iterable[Any]) -> Any:
    """Add calls of one shape, of which there is at least one."""
    return reduce(operator.add, terms)


def part(g: Any, axis: int, key: object) -> Any:
    return g[(slice(None),) * axis + (key,)]


def _concat(call: Any, g: Any) -> Iterator[Rule]:
    args, first = bound(call), 0
    axis = axis_of(args, g)
    for array in args["arrays"]:
        stop = first + (math.prod(array.shape) if args["axis"] is None else array.shape[axis])
        slope = partial(part, g, axis, slice(first, stop))
        yield array, slope if args["axis"] is not None else partial(_as_shape, slope, array.shape)
        first = stop


def _as_shape(make: Callable[[], Any], shape: Sequence[int]) -> Any:
    return arrays.reshape(make(), tuple(shape))


def _stack(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    for number, array in enumerate(args["arrays"]):
        yield array, partial(part, g, args["axis"] % len(g.shape), number)


def _cast(call: Any, g: Any) -> Iterator[Rule]:
    x = call.args[0]
    yield x, lambda: g if x.dtype == g.dtype else (arrays.real(g) if _narrows(g, x) else g).cast(x.dtype)


def _narrows(g: Any, x: Any) -> bool:
    return bool(g.dtype.kind == "complex" and x.dtype.kind != "complex")


def _same(call: Any, g: Any) -> Iterator[Rule]:
    yield call.args[0], lambda: g


def _flip(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    yield args["x"], lambda: arrays.flip(g, axis=args["axis"])


def _roll(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    shift = args["shift"]
    back = tuple(-distance for distance in shift) if isinstance(shift, (tuple, list)) else -shift
    yield args["x"], lambda: arrays.roll(g, back, axis=args["axis"])


def _rot90(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    yield args["x"], lambda: arrays.rot90(g, -args["k"], axes=args["axes"])


def _diagonal(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    x, offset = args["x"], args["offset"]
    rows, columns = x.shape[-2:]

    def slope() -> Any:
        first = np.arange(rows)[:, None] + offset == np.arange(columns)
        wide = (*x.shape[:-2], rows if offset >= 0 else columns)
        length = g.shape[-1]
        # Element i of the diagonal belongs to row i, counted from the begin of the diagonal.
        if offset >= 0:
            aligned = arrays.pad(g, [(0, 0)] * (len(wide) - 1) + [(0, rows - length)])
            return arrays.where(first, arrays.expand_dims(aligned, axis=-1), 0)
        aligned = arrays.pad(g, [(0, 0)] * (len(wide) - 1) + [(0, columns - length)])
        return arrays.where(first, arrays.expand_dims(aligned, axis=-2), 0)

    yield x, slope


def _windows(call: Any, g: Any) -> Iterator[Rule]:
    """Each element of a window gives its gradient to the element that it shows."""
    args = bound(call)
    x, axis, window = args["x"], args["axis"], args["window_shape"]
    sizes = [int(size) for size in np.atleast_1d(window)]
    count = len(x.shape)
    axes = axes_of(axis, x)

    def slope() -> Any:
        terms = list[Any]()
        for offsets in np.ndindex(*sizes):
            widths = [(0, 0)] * count
            for dim, offset, size in zip(axes, offsets, sizes, strict=True):
                leading, trailing = widths[dim]
                widths[dim] = leading + offset, trailing + size - 1 - offset
            terms.append(arrays.pad(g[(..., *offsets)], widths))
        return total_of(terms)

    yield x, slope


def _pad(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    x, mode = args["x"], args["mode"]
    pairs = np.broadcast_to(np.asarray(args["pad_width"]), (len(x.shape), 2)).tolist()
    inside = [slice(leading, leading + extent) for (leading, _), extent in zip(pairs, x.shape, strict=True)]
    if mode == "constant":
        yield x, lambda: g[tuple(inside)]
    else:
        yield x, lambda: unpadded(g, x.shape, pairs, mode)


def unpadded(g: Any, shape: Sequence[int], pairs: Sequence[Sequence[int]], mode: str) -> Any:
    """Return the gradient of an array by the gradient of the padded array, which repeats elements.

    Args:
        g: The gradient of the padded array.
        shape: Shape of the array.
        pairs: How many elements were added before and after, for each axis.
        mode: A mode of `numpy.pad` that repeats elements.
    """
    for axis, ((leading, trailing), extent) in enumerate(zip(pairs, shape, strict=True)):
        if not leading and not trailing:
            continue
        fill: Any = np.pad
        indices = fill(np.arange(extent), (leading, trailing), mode=mode)
        # The blocks of neighbours, repeated in order or in reverse order.
        terms = list[Any]()
        for start, stop in _runs(indices):
            first_index, last_index = int(indices[start]), int(indices[stop - 1])
            block = part(g, axis, slice(start, stop))
            if last_index < first_index:
                block, first_index, last_index = arrays.flip(block, axis=axis), last_index, first_index
            elif last_index == first_index and stop - start > 1:
                block = arrays.sum(block, axis=axis, keepdims=True)
            widths = [(0, 0)] * len(shape)
            widths[axis] = first_index, extent - last_index - 1
            terms.append(arrays.pad(block, widths))
        g = total_of(terms)
    return g


def _runs(indices: Any) -> Iterator[tuple[int, int]]:
    """Yield parts of indices that rise by one, fall by one, or stay."""
    start = 0
    while start < len(indices):
        steps = np.diff(indices[start:])
        is_run = bool(len(steps)) and abs(int(steps[0])) <= 1
        changes = np.flatnonzero(steps != steps[0]) if is_run else [0]
        stop = start + 1 + (int(changes[0]) if len(changes) else len(steps))
        yield start, stop
        start = stop


def filled(call: Any, g: Any) -> list[Any]:
    """Return the gradients of all results: zeros for unused ones."""
    return [arrays.zeros_like(call[k]) if slope is None else slope for k, slope in enumerate(g)]


def _unstack(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    yield args["x"], lambda: arrays.stack(filled(call, g), axis=args["axis"])


def _split(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    yield args["x"], lambda: arrays.concat(filled(call, g), axis=args["axis"])


def _broadcast_all(call: Any, g: Any) -> Iterator[Rule]:
    for operand, slope in zip(call.args, g, strict=True):
        yield operand, partial(_unbroadcast, operand, slope)


def _meshgrid(call: Any, g: Any) -> Iterator[Rule]:
    named: dict[str, Any] = dict(call.named or {})
    is_turned = named.get("indexing", "xy") == "xy" and len(g) > 1
    for number, (coordinates, slope) in enumerate(zip(call.args, g, strict=True)):
        axis = 1 - number if is_turned and number < 2 else number
        yield coordinates, partial(_along, coordinates, slope, axis)


def _unbroadcast(x: Any, g: Any) -> Any:
    return None if g is None else summed_to(g, x.shape)


def _along(coordinates: Any, g: Any, axis: int) -> Any:
    """Return the gradient of the coordinates along an axis of a grid."""
    if g is None:
        return None
    axes = tuple(k for k in range(len(g.shape)) if k != axis)
    return arrays.reshape(arrays.sum(g, axis=axes) if axes else g, coordinates.shape)


_TURNED = (
    "AccelRef.T",
    "AccelRef.mT",
    "AccelRef.transpose",
    "arrays.matrix_transpose",
    "linalg.matrix_transpose",
    "arrays.permute_dims",
    "arrays.moveaxis",
    "arrays.swapaxes",
)
_EXTREMA = ("max", "min", "nanmax", "nanmin")
RULES.update({
    "AccelRef.__getitem__": _taken, "AccelRef.copy": _cast, "AccelRef.reshape": _reshaped,
    "arrays.broadcast_arrays": _broadcast_all, "arrays.broadcast_to": _broadcast, "arrays.concat": _concat,
    "arrays.diagonal": _diagonal, "linalg.diagonal": _diagonal, "arrays.expand_dims": _reshaped,
    "arrays.flip": _flip,
    "arrays.logsumexp": of_real(_logsumexp),
    "arrays.mean": _mean, "arrays.meshgrid": _meshgrid, "arrays.pad": _pad, "arrays.prod": _prod,
    "arrays.reshape": _reshaped,
    "arrays.roll": _roll, "arrays.rot90": _rot90,
    "arrays.sliding_window_view": _windows, "arrays.split": _split, "arrays.squeeze": _reshaped,
    "arrays.stack": _stack,
    "arrays.std": of_real(_std), "arrays.sum": _sum, "arrays.unstack": _unstack, "arrays.unwrap": _same,
    **dict.fromkeys(_TURNED, _turned),
    **{f"arrays.{name}": _extreme for name in _EXTREMA},
    "arrays.nanprod": composition(_nanprod), "arrays.nanstd": of_real(_nanstd),
})  # fmt: skip
