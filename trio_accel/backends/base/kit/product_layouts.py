"""Layouts of arrays with any strides for a library that takes leading dimensions and increments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import attrs

from ..contract.device_array import merged
from ..contract.dtypes import Ints, Strs
from ..contract.ops import Transpose, contiguous_strides
from .blas import leading

Packing: TypeAlias = Literal["plain", "conjugate"]
"""Copy of an operand in C order, before the product."""

_LETTERS = {"N": 0, "T": 1, "C": 2}
# The most calls for one product: more would cost as much as copies of its operands.
_MOST_GROUPS = 1024


class BatchStart(NamedTuple):
    """The beginning of one strided batch, in bytes from each operand's address."""

    a: int
    b: int
    c: int


def _has_no_batch(product: Product) -> bool:
    return product.batches == 1 and len(product.groups) == 1


@attrs.frozen(kw_only=True)
class Product:
    """A product in the library's terms: column-major, sizes and strides in elements.

    Attributes:
        is_swapped: Whether the library's first operand is b: of row-major arrays it makes the transpose.
        call: The library's letters of its first and second operand, m, n, k, and three leading dimensions.
        batches: Products in one call.
        steps: From one product to the next, for its three operands.
        groups: One call for each.
        packing_a, packing_b: The layout of an operand's copy; None to read the operand in place.
        is_in_full: Whether both operands are copied with all batches, instead of as they are.
        is_c_packed: Whether the result is made elsewhere and copied.
        is_single: Whether there is no batch.
    """

    is_swapped: bool
    call: tuple[int, int, int, int, int, int, int, int]
    batches: int = 1
    steps: tuple[int, int, int] = (0, 0, 0)
    groups: tuple[BatchStart, ...] = (BatchStart(0, 0, 0),)
    packing_a: Packing | None = None
    packing_b: Packing | None = None
    is_in_full: bool = False
    is_c_packed: bool = False
    is_single: bool = attrs.field(init=False, default=attrs.Factory(_has_no_batch, takes_self=True))

    @property
    def is_packed(self) -> bool:
        """Whether any array is copied."""
        return self.is_c_packed or self.packing_a is not None or self.packing_b is not None


class Matrices(NamedTuple):
    """One operand of a product as a batch of matrices, in bytes."""

    shape: tuple[int, int]
    strides: tuple[int, int]
    batch_strides: Ints


class Contraction(NamedTuple):
    """A contraction as a batch of matrix products.

    Attributes:
        axes: The axes of a, b and the result, in the order for a stack of matrices.
        product: The product of these matrices. Operands are packed in that order.
    """

    axes: tuple[Ints, Ints, Ints]
    product: Product


class _Side(NamedTuple):
    """Layout of a matrix: by rows or by columns, and the elements from one to the next."""

    has_rows: bool
    leading: int


class _Operand(NamedTuple):
    operation: int
    leading: int
    packing: Packing | None


def plan_gemm(
    letters: tuple[Transpose, Transpose],
    shapes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    strides: tuple[Ints, Ints, Ints],
    itemsize: int,
    *,
    is_complex: bool,
) -> Product:
    """Find the call for ``c = op(a) @ op(b)`` of matrices with any strides; none is empty."""
    side = _side(shapes[2], strides[2], itemsize)
    is_swapped = side is None or side.has_rows
    rows, columns = shapes[2]
    inner = shapes[0][1] if letters[0] == "N" else shapes[0][0]
    operands = [
        _operand(shape, step, letter if is_complex or letter == "N" else "T", itemsize, is_swapped)
        for shape, step, letter in zip(shapes, strides, letters, strict=False)
    ]
    of_c = columns if side is None else side.leading
    return attrs.evolve(
        _product(operands, (rows, columns, inner), of_c, is_swapped=is_swapped),
        packing_a=operands[0].packing,
        packing_b=operands[1].packing,
        is_c_packed=side is None,
    )


def _product(
    operands: Sequence[_Operand], sizes: tuple[int, int, int], of_c: int, *, is_swapped: bool
) -> Product:
    """Make the call for one product from its rows, columns and inner dimension."""
    (rows, columns, inner), (lhs, rhs) = sizes, operands
    first, second = (rhs, lhs) if is_swapped else (lhs, rhs)
    m, n = (columns, rows) if is_swapped else (rows, columns)
    call = first.operation, second.operation, m, n, inner, first.leading, second.leading, of_c
    return Product(is_swapped=is_swapped, call=call)


def plan_matmul(
    shapes: tuple[Ints, Ints],
    strides: tuple[Ints, Ints],
    itemsize: int,
    *,
    is_fused: bool = False,
    keeps_stack: bool = False,
) -> Product:
    """Find the calls for ``a @ b`` by NumPy's rules; nothing is empty, and the result is in C order.

    Args:
        shapes: The shapes of a and b.
        strides: The strides of a and b.
        itemsize: Bytes of an element.
        is_fused: Whether there is to be one call, which makes the transpose.
        keeps_stack: Whether a stack of products with one right side stays a stack.
    """
    max_groups = 1 if is_fused else _MOST_GROUPS
    packings: list[Packing | None] = [None, None]
    laid_out = list(strides)
    for number, (shape, step) in enumerate(zip(shapes, strides, strict=True)):
        if not _is_addressable(shape, step, itemsize):
            packings[number] = "plain"
            laid_out[number] = contiguous_strides(shape, itemsize)
    options = is_fused, keeps_stack
    product = _batched(shapes, (laid_out[0], laid_out[1]), itemsize, *options)
    if len(product.groups) > max_groups:
        batch, *operands = broadcast_operands(shapes, strides)
        full = (*batch, *operands[0].shape), (*batch, *operands[1].shape)
        in_order = contiguous_strides(full[0], itemsize), contiguous_strides(full[1], itemsize)
        product = _batched(full, in_order, itemsize, *options)
        return attrs.evolve(product, packing_a="plain", packing_b="plain", is_in_full=True)
    return attrs.evolve(product, packing_a=packings[0], packing_b=packings[1])


def plan_contraction(
    terms: tuple[str, str, str],
    shapes: tuple[Ints, Ints, Ints],
    strides: tuple[Ints, Ints, Ints],
    itemsize: int,
) -> Contraction:
    """Find the calls for a contraction of arrays with any strides; nothing is empty.

    All row axes become one axis, and so do all column axes and all inner axes. Each group gets an order that
    both arrays with these axes share: an order in which one of them is stored, chosen so that the fewest
    bytes are copied. A library of transposes and products computes any contraction in this way (TTGT:
    Springer and Bientinesi, "Design of a high-performance GEMM-like tensor-tensor multiplication", 2018).

    Args:
        terms: Letters of the axes of a, b and the result; each is in at least two of them.
        shapes: Their shapes.
        strides: Their strides.
        itemsize: Bytes of an element.
    """
    a, b, out = terms
    batch = tuple(letter for letter in out if letter in a and letter in b)
    extents = dict(zip(a + b, shapes[0] + shapes[1], strict=True))
    arrays = [dict(zip(term, step, strict=True)) for term, step in zip(terms, strides, strict=True)]
    # For rows, columns and inner axes: the two arrays with these axes, and the array without.
    groups = [
        [
            _by_strides(arrays[has], set(terms[first]) & set(terms[second]) - set(terms[third]))
            for has in (first, second)
        ]
        for first, second, third in ((2, 0, 1), (2, 1, 0), (0, 1, 2))
    ]
    best: tuple[int, Contraction] | None = None
    for rows, columns, inner in itertools.product(*groups):
        orders = (batch, rows, inner), (batch, inner, columns), (batch, rows, columns)
        laid_out = [
            _lay_out(order, array, extents, itemsize) for order, array in zip(orders, arrays, strict=True)
        ]
        copied = sum(
            math.prod(shape) for (_, is_packed), shape in zip(laid_out, shapes, strict=True) if is_packed
        )
        if best is None or copied < best[0]:
            axes = tuple(
                tuple(term.index(letter) for group in order for letter in group)
                for term, order in zip(terms, orders, strict=True)
            )
            product = _of_arrays(tuple(extents[letter] for letter in batch), laid_out, itemsize)
            best = copied, Contraction((axes[0], axes[1], axes[2]), product)
    assert best is not None
    return best[1]


def _by_strides(strides: dict[str, int], letters: set[str]) -> Strs:
    """Sort axes by their strides, the longest first."""
    return tuple(sorted(letters, key=lambda letter: (-strides[letter], letter)))


def _lay_out(
    order: tuple[Strs, Strs, Strs],
    strides: dict[str, int],
    extents: dict[str, int],
    itemsize: int,
) -> tuple[Matrices, bool]:
    """See an array as a batch of matrices; returns them, and whether it has to be packed for that."""
    batch, *sides = order
    shape = [math.prod(extents[letter] for letter in side) for side in sides]
    joined = [
        merged(tuple(extents[letter] for letter in side), (tuple(strides[letter] for letter in side),))
        for side in sides
    ]
    steps = tuple(strides[letter] for letter in batch)
    if all(len(run) <= 1 for run, _ in joined):
        step = [row[0] if row else 0 for _, (row,) in joined]
        matrices = Matrices((shape[0], shape[1]), (step[0], step[1]), steps)
        lead = tuple(extents[letter] for letter in batch)
        if _is_addressable((*lead, *shape), (*steps, *step), itemsize):
            return matrices, False
    return _packed((*(extents[letter] for letter in batch), *shape), itemsize), True


def _packed(shape: Ints, itemsize: int) -> Matrices:
    steps = contiguous_strides(shape, itemsize)
    return Matrices((shape[-2], shape[-1]), (steps[-2], steps[-1]), steps[:-2])


def _of_arrays(batch: Ints, stacks: Sequence[tuple[Matrices, bool]], itemsize: int) -> Product:
    """Find the calls for stacks of matrices, of which some have to be packed."""
    (lhs, rhs, out), packed = zip(*stacks, strict=True)
    product = _of_stacks(batch, (lhs, rhs, out), itemsize)
    if len(product.groups) > _MOST_GROUPS:
        full = [(_packed((*batch, *matrices.shape), itemsize), True) for matrices in (lhs, rhs, out)]
        return _of_arrays(batch, full, itemsize)
    packings: list[Packing | None] = ["plain" if is_packed else None for is_packed in packed]
    return attrs.evolve(product, packing_a=packings[0], packing_b=packings[1], is_c_packed=packed[2])


def _of_stacks(
    batch: Ints,
    stacks: tuple[Matrices, Matrices, Matrices],
    itemsize: int,
    *,
    is_fused: bool = False,
) -> Product:
    """Find the calls for stacks of matrices as they lie, of which all three have the whole batch."""
    lhs, rhs, out = stacks
    (rows, inner), (_, columns) = lhs.shape, rhs.shape
    side = _side(out.shape, out.strides, itemsize)
    is_swapped = side is None or side.has_rows
    if columns == 1 and not is_fused and (rows == 1 or out.strides[0] == itemsize):
        # One column is made as the library's own matrix by vector.
        is_swapped, side = False, _Side(False, max(rows, 1))
    operands = [
        _operand(matrices.shape, matrices.strides, "N", itemsize, is_swapped) for matrices in (lhs, rhs)
    ]
    of_c = columns if side is None else side.leading
    product = _product(operands, (rows, columns, inner), of_c, is_swapped=is_swapped)
    batches, step, groups = _groups(batch, lhs.batch_strides, rhs.batch_strides, out.batch_strides)
    first, second = (step.b, step.a) if is_swapped else (step.a, step.b)
    steps = first // itemsize, second // itemsize, step.c // itemsize
    return attrs.evolve(product, batches=batches, steps=steps, groups=groups)


def _batched(
    shapes: tuple[Ints, Ints],
    strides: tuple[Ints, Ints],
    itemsize: int,
    is_fused: bool,
    keeps_stack: bool,
) -> Product:
    """Return the calls for operands that can be read in place."""
    batch, lhs, rhs = broadcast_operands(shapes, strides)
    (rows, inner), (step, along), a_steps = lhs
    if not any(rhs.batch_strides) and not keeps_stack:
        # One large product instead of many with the same right side.
        extents, (steps,) = merged((*batch, rows), ((*a_steps, step),))
        if len(extents) == 1 and _side((extents[0], inner), (steps[0], along), itemsize) is not None:
            batch, rhs = (), rhs._replace(batch_strides=())
            lhs = Matrices((extents[0], inner), (steps[0], along), ())
    out = _packed((*batch, lhs.shape[0], rhs.shape[1]), itemsize)
    return _of_stacks(batch, (lhs, rhs, out), itemsize, is_fused=is_fused)


def _groups(
    batch: Ints, a_steps: Ints, b_steps: Ints, c_steps: Ints
) -> tuple[int, BatchStart, tuple[BatchStart, ...]]:
    """Cut a batch into runs of one distance in each operand: their length, the distances, the beginnings."""
    shape, steps = merged(batch, (a_steps, b_steps, c_steps))
    if not shape:
        return 1, BatchStart(0, 0, 0), (BatchStart(0, 0, 0),)
    longest = shape.index(max(shape))
    axes = [axis for axis in range(len(shape)) if axis != longest]
    beginnings = (
        BatchStart(
            *(sum(index * row[axis] for index, axis in zip(position, axes, strict=True)) for row in steps)
        )
        for position in itertools.product(*(range(shape[axis]) for axis in axes))
    )
    # There may be millions, which are not wanted.
    groups = tuple(itertools.islice(beginnings, _MOST_GROUPS + 1))
    return shape[longest], BatchStart(*(row[longest] for row in steps)), groups


def _operand(shape: Sequence[int], strides: Ints, letter: str, itemsize: int, is_swapped: bool) -> _Operand:
    side = _side(shape, strides, itemsize)
    packing: Packing | None = None if side is not None else "plain"
    if side is None:
        side = _Side(True, max(shape[1], 1))
    if side.has_rows == is_swapped:
        # The library sees op's own operand, transposed as often as its result is.
        return _Operand(_LETTERS[letter], side.leading, packing)
    if letter == "C":
        # No letter means conjugated and not transposed.
        if is_swapped:
            return _Operand(_LETTERS["C"], max(shape[1], 1), "plain")
        return _Operand(_LETTERS["N"], max(shape[1], 1), "conjugate")
    return _Operand(_LETTERS["T" if letter == "N" else "N"], side.leading, packing)


def _side(shape: Sequence[int], strides: Ints, itemsize: int) -> _Side | None:
    rows, columns = shape
    lead = leading(rows, columns, strides[0], strides[1], itemsize)
    if lead is not None:
        return _Side(True, lead)
    lead = leading(columns, rows, strides[1], strides[0], itemsize)
    return None if lead is None else _Side(False, lead)


def _is_addressable(shape: Ints, strides: Ints, itemsize: int) -> bool:
    if len(shape) == 1:
        return shape[0] <= 1 or (strides[0] > 0 and strides[0] % itemsize == 0)
    return _side(shape[-2:], strides[-2:], itemsize) is not None and all(
        extent <= 1 or (step >= 0 and step % itemsize == 0)
        for extent, step in zip(shape[:-2], strides[:-2], strict=True)
    )


def broadcast_operands(
    shapes: tuple[Ints, Ints], strides: tuple[Ints, Ints]
) -> tuple[Ints, Matrices, Matrices]:
    """The batch of a product by NumPy's rules, and both operands in it: a vector is a row, or a column."""
    pairs = itertools.zip_longest(*(reversed(shape[:-2]) for shape in shapes), fillvalue=1)
    batch = tuple(b if a == 1 else a for a, b in pairs)[::-1]
    operands: list[Matrices] = []
    for shape, step in zip(shapes, strides, strict=True):
        leads, ndim = _batch_strides(shape[:-2], step[:-2], batch), len(shape)
        if ndim > 1:
            operands.append(Matrices((shape[-2], shape[-1]), (step[-2], step[-1]), leads))
        elif operands:
            operands.append(Matrices((shape[-1], 1), (step[-1], 0), leads))
        else:
            operands.append(Matrices((1, shape[-1]), (0, step[-1]), leads))
    return batch, operands[0], operands[1]


def _batch_strides(shape: Ints, strides: Ints, batch: Ints) -> Ints:
    missing = (0,) * (len(batch) - len(shape))
    return missing + tuple(0 if extent == 1 else step for extent, step in zip(shape, strides, strict=True))


def vectors(shape: Ints, itemsize: int, *strides: Ints) -> list[tuple[int, int]] | None:
    """See arrays of one shape as vectors, alike in all of them.

    Returns:
        For each array the bytes from its first element to the vector's, and the vector's increment in
        elements, above 0. None if an array has no single increment in an order that suits all.
    """
    offsets = [0] * len(strides)
    axes: list[tuple[int, Ints]] = []
    for axis, extent in enumerate(shape):
        steps = tuple(row[axis] for row in strides)
        if steps[-1] < 0:
            offsets = [offset + (extent - 1) * step for offset, step in zip(offsets, steps, strict=True)]
            steps = tuple(-step for step in steps)
        axes.append((extent, steps))
    axes.sort(key=lambda item: item[1][-1], reverse=True)
    extents = tuple(extent for extent, _ in axes)
    joined, rows = merged(extents, tuple(tuple(steps[i] for _, steps in axes) for i in range(len(strides))))
    if math.prod(joined) == 1:
        return [(offset, 1) for offset in offsets]
    if len(joined) > 1 or any(row[0] <= 0 or row[0] % itemsize for row in rows):
        return None
    return [(offset, row[0] // itemsize) for offset, row in zip(offsets, rows, strict=True)]
