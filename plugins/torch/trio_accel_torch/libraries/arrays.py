"""Functions of arrays: expressions, order, groups, scans, searches and counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trio_accel.backends.base import ArraySpec, DType, kernel, ops
from trio_accel.backends.base.expressions import decode_program, unpack_scalars

from .._device import refuse
from .._evaluate import Evaluation
from .._views import carrier, cast, comparable, number, part, read, turned, write
from ..manifest import BACKEND

T = torch.Tensor


@kernel(ops.ExpressionSpec, backend=BACKEND)
def compute(spec: ops.ExpressionSpec, call: Any) -> None:
    """Compute a program of elements, reductions or stores."""
    decoded, where = decode_program(spec.program), call.device.where
    program, arguments = decoded.program, decoded.arguments
    if 0 in spec.shape and (not program.reductions or all(0 in out.shape for out in spec.results)):
        return
    dtypes = [each.dtype for each in arguments if not each.is_array]
    numbers = zip(unpack_scalars(spec.scalars, dtypes), dtypes, strict=True)
    scalars = iter([number(value, dtype, where) for value, dtype in numbers])
    arrays = iter([read(call, array) for array in spec.arrays])
    given: list[T | None] = []
    for place, argument in enumerate(arguments):
        is_element = argument.is_array and place in program.elements
        given.append(next(arrays) if is_element else None if argument.is_array else next(scalars))
    loaded = [read(call, array) for array in spec.loaded]
    # They are read by the program while it stores.
    stored = [read(call, array).clone() for array in spec.stored]
    indexed = dict(zip([place for place, _ in program.loads], [*loaded, *stored], strict=True))
    evaluation = Evaluation(program, given, arguments, indexed, spec.shape, spec.axes, where)
    made = evaluation.results()
    results = [value.clone() for value in made] if len(made) > 1 else made
    for out, value in zip(spec.results, results, strict=True):
        if program.reductions and out.shape != spec.shape:
            rows = [1 if axis in spec.axes else extent for axis, extent in enumerate(spec.shape)]
            whole = value.expand(rows).reshape(out.shape)
        else:
            whole = value.expand(out.shape)
        write(call, out, _apart(call, spec, out, whole))
    for out, value in zip(spec.stored, stored, strict=True):
        write(call, out, value)


def _apart(call: Any, spec: ops.ExpressionSpec, out: ArraySpec, value: T) -> T:
    """Return a value that shares no memory with the result, unless both are the same elements."""
    is_read = any(array.block == out.block for array in spec.arrays)
    return value.clone() if is_read and out.dtype not in (DType.uint16, DType.uint32) else value


def order_of(x: T, dtype: DType, *, descending: bool = False) -> T:
    """Return the indices that sort along the last axis; equal elements keep their order, and NaN is last."""
    key = comparable(x, dtype)
    if key.is_complex():
        # By the imaginary part, and then, stably, by the real one.
        by_imag = _sorted(key.imag, descending=descending)
        by_real = _sorted(key.real.gather(-1, by_imag), descending=descending)
        return by_imag.gather(-1, by_real)
    return _sorted(key, descending=descending)


def _sorted(key: T, *, descending: bool) -> T:
    if key.is_floating_point() and key.device.type != "cpu":
        # Cards sort by bits, so a NaN with a sign would be the smallest number.
        key = key.masked_fill(key.isnan(), float("nan"))
    return torch.sort(key, stable=True, dim=-1, descending=descending)[1]


@kernel(ops.SortSpec, backend=BACKEND)
def sort(spec: ops.SortSpec, call: Any) -> None:
    """Sort along an axis."""
    x = read(call, spec.x).movedim(spec.axis, -1)
    order = order_of(x, spec.x.dtype, descending=spec.descending)
    for out, value in ((spec.values, None), (spec.indices, order)):
        if out is not None:
            first = order[..., : out.shape[spec.axis]]
            write(call, out, (x.gather(-1, first) if value is None else first).movedim(-1, spec.axis))


_SCANS = {"sum": torch.cumsum, "prod": torch.cumprod}


@kernel(ops.ScanSpec, backend=BACKEND)
def scan(spec: ops.ScanSpec, call: Any) -> None:
    """Combine the elements up to each one."""
    dtype = spec.out.dtype
    wide = ops.accumulator_of(dtype)
    x = cast(cast(read(call, spec.x), spec.x.dtype, dtype), dtype, wide).movedim(spec.axis, 0)
    if spec.combine in _SCANS:
        made = _scanned(spec.combine, x)
        # PyTorch adds the first element to 0.
        made[:1] = x[:1]
        if spec.combine == "sum" and wide.is_inexact and x.numel():
            made = _with_signs_of_zeros(x, made)
        made = cast(made, wide, dtype)
    elif spec.combine == "logaddexp":
        made = cast(torch.logcumsumexp(x, 0), wide, dtype)
    else:
        key = comparable(x, wide)
        found = (torch.cummin if spec.combine == "min" else torch.cummax)(key, 0)[0]
        made = cast(turned(found) if wide is DType.uint64 else found.to(x.dtype), wide, dtype)
    if spec.has_initial:
        identity = np.asarray(ops.identity_of(spec.combine, dtype)).astype(dtype.dtype)
        first = number(identity, dtype, call.device.where).expand((1, *made.shape[1:]))
        made = torch.cat([first, made])
    write(call, spec.out, made.movedim(0, spec.axis))


def _scanned(combine: str, x: T) -> T:
    if x.is_complex() and x.device.type == "cpu":
        # PyTorch's products of infinite complex numbers differ from NumPy's.
        scans: dict[str, Any] = {"sum": np.cumsum, "prod": np.cumprod}
        with np.errstate(all="ignore"):
            return torch.from_numpy(scans[combine](x.resolve_conj().numpy(), axis=0))
    return _SCANS[combine](x, 0, dtype=x.dtype)


def _with_signs_of_zeros(x: T, sums: T) -> T:
    """Make sums negative zeros where all elements so far are."""
    if x.is_complex():
        parts = [_with_signs_of_zeros(x.real, sums.real), _with_signs_of_zeros(x.imag, sums.imag)]
        return torch.complex(parts[0], parts[1])
    is_zero = ((x == 0) & torch.signbit(x)).to(torch.uint8)
    return torch.where(torch.cummin(is_zero, 0)[0] == 1, x, sums)


def _count(words: Any, count: int) -> None:
    words.view(np.int64)[0] = count


@kernel(ops.SelectSpec, backend=BACKEND)
def select(spec: ops.SelectSpec, call: Any) -> None:
    """Select items, or find where they are."""
    call.status(spec.count)
    flags = read(call, spec.flags) != 0
    if spec.x is None:
        found = torch.nonzero(flags, as_tuple=True)
        for out, indices in zip(spec.out, found, strict=True):
            write(call, part(out, 0, len(indices)), indices)
        _count(spec.count, len(found[0]) if found else int(flags.sum()))
        return
    x, out = read(call, spec.x), spec.out[0]
    selected = x[flags]
    rest = x[~flags] if spec.is_whole else None
    write(call, part(out, 0, len(selected)), selected)
    if rest is not None:
        write(call, part(out, len(selected), len(rest)), rest)
    _count(spec.count, len(selected))


@kernel(ops.GroupSpec, backend=BACKEND)
def group(spec: ops.GroupSpec, call: Any) -> None:
    """Find groups of equal elements."""
    call.status(spec.count)
    x, order = read(call, spec.x), None
    if spec.is_sorted:
        order = order_of(x, spec.x.dtype)
        x = x[order]
    begins = torch.ones(len(x), dtype=torch.bool, device=x.device)
    begins[1:] = x[1:] != x[:-1]
    starts = begins.nonzero()[:, 0]
    count = len(starts)
    ends = torch.tensor([len(x)], device=x.device)
    write(call, part(spec.values, 0, count), x[starts])
    if spec.counts is not None:
        write(call, part(spec.counts, 0, count), torch.diff(starts, append=ends))
    if spec.indices is not None:
        write(call, part(spec.indices, 0, count), starts if order is None else order[starts])
    if spec.inverse is not None:
        numbers = torch.cumsum(begins, 0) - 1
        if order is not None:
            numbers = torch.empty_like(numbers).scatter_(0, order, numbers)
        write(call, spec.inverse, numbers)
    _count(spec.count, count)


def _places(edges: T, x: T, edge_type: DType, x_type: DType, side: str) -> T:
    """Find where values go into a vector in order, in which NaN is last."""
    if edge_type.kind == "complex" or x_type.kind == "complex":
        refuse("searchsorted of complex numbers")
    known = int((~torch.isnan(edges)).sum()) if edge_type.is_inexact else len(edges)
    found = _places_of_numbers(edges[:known], x, edge_type, x_type, side)
    if x_type.is_inexact:
        found = torch.where(torch.isnan(x), known if side == "left" else len(edges), found)
    return found


def _places_of_numbers(edges: T, x: T, edge_type: DType, x_type: DType, side: str) -> T:
    """Do so without NaN; integers of 64 bits are compared exactly."""
    is_right = side == "right"
    if edge_type is x_type or not (edge_type.is_inexact or x_type.is_inexact):
        keys = [_whole(value, dtype) for value, dtype in ((edges, edge_type), (x, x_type))]
        if DType.uint64 in (edge_type, x_type) and edge_type is not x_type:
            # A number with a sign is below all of uint64 where it is negative.
            signed = x if edge_type is DType.uint64 else edges
            keys = [
                turned(value) if dtype is DType.uint64 else turned(value.to(torch.int64).clamp(min=0))
                for value, dtype in ((edges, edge_type), (x, x_type))
            ]
            found = torch.searchsorted(keys[0].contiguous(), keys[1].contiguous(), right=is_right)
            if signed is x:
                return torch.where(x < 0, 0, found)
            below = int((edges < 0).sum())
            return found if is_right else torch.maximum(found, torch.tensor(below, device=x.device))
        return torch.searchsorted(keys[0].contiguous(), keys[1].contiguous(), right=is_right)
    if DType.int64 in (edge_type, x_type) or DType.uint64 in (edge_type, x_type):
        return _by_bisection(edges, x, edge_type, x_type, is_right=is_right)
    wide = torch.float64
    return torch.searchsorted(edges.to(wide).contiguous(), x.to(wide).contiguous(), right=is_right)


def _by_bisection(edges: T, x: T, edge_type: DType, x_type: DType, *, is_right: bool) -> T:
    """Compare integers of 64 bits with floating numbers: by the next integer below or above."""
    limits = np.iinfo((x_type if edge_type.is_inexact else edge_type).dtype)
    low, high = float(limits.min), float(limits.max + 1)

    def whole(value: T, *, is_up: bool) -> T:
        made = (torch.ceil if is_up else torch.floor)(value.double())
        inside = torch.where((made >= low) & (made < high), made, torch.zeros_like(made))
        return cast(inside, DType.float64, DType.uint64 if limits.min == 0 else DType.int64)

    def key(value: T) -> T:
        return turned(value) if limits.min == 0 else value.to(torch.int64)

    if edge_type.is_inexact:
        wide = edges.double()
        first, last = int((wide < low).sum()), int((wide < high).sum())
        # An edge is at most an integer if its next integer is, and below it if the integer before is.
        inside = key(whole(wide[first:last], is_up=is_right))
        return first + torch.searchsorted(inside.contiguous(), key(x).contiguous(), right=is_right)
    number_ = x.double()
    found = torch.searchsorted(
        key(edges).contiguous(), key(whole(number_, is_up=not is_right)).contiguous(), right=is_right
    )
    above = ~(number_ < high)
    return torch.where(number_ < low, 0, torch.where(above, len(edges), found))


def _whole(value: T, dtype: DType) -> T:
    key = comparable(value, dtype)
    return key if dtype.is_inexact else key.to(torch.int64)


@kernel(ops.SearchSpec, backend=BACKEND)
def search(spec: ops.SearchSpec, call: Any) -> None:
    """Find where values are to be inserted."""
    call.status(spec.fault)
    edges, x = read(call, spec.edges), read(call, spec.x)
    if spec.sorter is not None:
        sorter = read(call, spec.sorter)
        if sorter.numel() and not 0 <= int(sorter.min()) <= int(sorter.max()) < len(edges):
            spec.fault[0] = 1
            return
        edges = edges[sorter.long()]
    write(call, spec.out, _places(edges, x, spec.edges.dtype, spec.x.dtype, spec.side))


@kernel(ops.CountSpec, backend=BACKEND)
def count(spec: ops.CountSpec, call: Any) -> None:
    """Count the elements of bins."""
    call.status(spec.fault)
    x, bins = read(call, spec.x).reshape(-1), spec.out.shape[0]
    weights = None if spec.weights is None else read(call, spec.weights).reshape(-1)
    if spec.edges is not None:
        edges = read(call, spec.edges)
        found = _places(edges, x, spec.edges.dtype, spec.x.dtype, "right")
        # The last bin has its upper edge; of NaN nothing is at an edge.
        is_last = (found > bins) & (_places(edges[-1:], x, spec.edges.dtype, spec.x.dtype, "left") == 0)
        if spec.x.dtype.is_inexact:
            is_last &= ~torch.isnan(x)
        found = torch.where(is_last, bins, found)
        if spec.bounds:
            found = found.clamp(1, bins) * _is_between(x, spec.x.dtype, *spec.bounds)
        kept = (found >= 1) & (found <= bins)
        x, weights = found[kept] - 1, None if weights is None else weights[kept]
    elif x.numel() and ((spec.x.dtype is DType.uint64 and bool((x < 0).any())) or not _are_bins(x, bins)):
        spec.fault[0] = 1
        return
    write(call, spec.out, torch.bincount(x.long(), weights, bins)[:bins])


def _is_between(x: T, dtype: DType, low: int, high: int) -> T:
    """Compare integers with two bounds, which may be beyond all of the type."""
    if dtype is not DType.uint64:
        return (x >= low) & (x <= high)
    if high < 0 or low >= 1 << 64:
        return torch.zeros_like(x, dtype=torch.bool)
    # As int64, these bits have the order of the numbers, moved by half of the range.
    moved, half = turned(x), 1 << 63
    return (moved >= max(low, 0) - half) & (moved <= min(high, 2 * half - 1) - half)


def _are_bins(x: T, bins: int) -> bool:
    return int(x.min()) >= 0 and int(x.max()) < bins


@kernel(ops.SegmentSpec, backend=BACKEND)
def combine_segments(spec: ops.SegmentSpec, call: Any) -> None:
    """Combine segments."""
    call.status(spec.fault)
    x, offsets, dtype = read(call, spec.x), read(call, spec.offsets).long(), spec.out.dtype
    first, last = offsets[:-1], offsets[1:]
    is_empty = last == first
    if bool((last < first).any()) or int(offsets[0]) < 0 or int(offsets[-1]) > len(x):
        spec.fault[0] = 1
    elif spec.combine not in ops.IDENTITIES and bool(is_empty.any()):
        spec.fault[0] = 2
    elif spec.out.shape[0]:
        wide = ops.accumulator_of(dtype)
        values = cast(cast(x, spec.x.dtype, dtype), dtype, wide)[int(offsets[0]) : int(offsets[-1])]
        numbers = torch.repeat_interleave(torch.arange(len(first), device=x.device), last - first)
        write(call, spec.out, cast(_segments(values, numbers, len(first), spec.combine, wide), wide, dtype))


def _segments(values: T, numbers: T, many: int, combine: str, dtype: DType) -> T:
    made = torch.full((many,), combine == "prod", dtype=carrier(dtype), device=values.device)
    if combine == "sum":
        if dtype is DType.bool:
            return made.index_fill_(0, numbers[values], True)
        if not dtype.is_inexact:
            return made.index_add_(0, numbers, values)
        # A sum of negative zeros is one. Parts are added alone, because an infinite one times 1 is NaN.
        parts = [torch.view_as_real(one) if one.is_complex() else one for one in (-made, values)]
        parts[0].index_add_(0, numbers, parts[1])
        made = torch.view_as_complex(parts[0]) if made.is_complex() else parts[0]
        return torch.where(torch.bincount(numbers, minlength=many) == 0, 0, made)
    if combine == "prod" and values.is_complex():
        for place in range(many):
            part = values[numbers == place]
            if part.device.type == "cpu" and len(part):
                # PyTorch's products begin with 1, and differ from NumPy's where numbers are infinite.
                with np.errstate(all="ignore"):
                    made[place] = complex(np.multiply.reduce(part.resolve_conj().numpy(), initial=None))
            else:
                made[place] = part.prod()
        return made
    key, whole = comparable(values, dtype), comparable(made, dtype)
    if combine == "prod" and dtype is not DType.bool:
        key, whole = values, made
    name = {"prod": "amin" if dtype is DType.bool else "prod", "min": "amin", "max": "amax"}[combine]
    found = whole.scatter_reduce(0, numbers, key, name, include_self=combine == "prod")
    return turned(found) if dtype is DType.uint64 and combine != "prod" else found.to(made.dtype)
