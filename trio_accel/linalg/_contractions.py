"""Sums of products by their axes, and products without sums."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs
import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple
from numpy.lib.stride_tricks import as_strided

from ..backends.base import DType, DTypeLike
from ..devices import AccelRef, Operand
from ..devices.base._views import NoViewError
from ..expressions import Elementwise, Reduction
from ._matrices import matmul
from ._views import (
    ARRAYS,
    check_matrices,
    check_operands,
    diagonal,
    intermediates,
    on_device,
    permuted,
    viewed,
)

__all__ = ["cross", "einsum", "kron", "outer", "tensordot", "trace", "vecdot"]

_multiply = functools.partial(Elementwise[AccelRef], "x * y", library=ARRAYS)
_OUTER = _multiply(operation="linalg.outer")
_KRON = _multiply(operation="linalg.kron")
_PRODUCT = _multiply(operation="linalg.einsum")


async def vecdot(x1: Operand, x2: Operand, /, *, axis: int = -1, out: AccelRef | None = None) -> AccelRef:
    """Sums of products of vectors, as `numpy.linalg.vecdot`: of ``conj(x1) * x2`` along an axis.

    One launch. float16, bfloat16 and float32 are added in float64, and rounded once; whole numbers wrap
    around.

    Args:
        x1: Array of a numeric dtype.
        x2: Array of the same dtype; the shapes broadcast.
        axis: Axis that holds the vectors, of one length.
        out: Array to write to, of the same kind of dtype: the result is converted to it.

    Returns:
        The sums, of the dtype of the operands, and of their shape without the axis.

    Raises:
        ValueError: Lengths that differ, even if one is 1, or an axis that there is not.
    """
    dtype = check_operands("vecdot", x1=x1, x2=x2)
    first, second = _last("vecdot", x1, axis), _last("vecdot", x2, axis)
    if first.shape[-1] != second.shape[-1]:
        raise ValueError(
            f"vecdot: the vectors must have one length, got shapes {x1.shape} and {x2.shape} with axis {axis}"
        )
    text = "conj(x) * y" if dtype.kind == "complex" else "x * y"
    return await _sum("vecdot", text, dtype.value)(first, second, axis=-1, out=out)


async def outer(x1: Operand, x2: Operand, /, *, out: AccelRef | None = None) -> AccelRef:
    """Products of all elements of two vectors, as `numpy.linalg.outer`; one launch.

    Args:
        x1: Vector of shape (m,).
        x2: Vector of shape (n,), of the same dtype.
        out: Array to write to, of the same kind of dtype: the result is converted to it.

    Returns:
        The products, of shape (m, n).
    """
    check_operands("outer", x1=x1, x2=x2)
    for name, array in (("x1", x1), ("x2", x2)):
        if len(array.shape) != 1:
            raise ValueError(f"outer: {name} must have one axis, got shape {array.shape}")
    return await _OUTER(x1[:, None], x2[None, :], out=out)


async def kron(a: Operand, b: Operand) -> AccelRef:
    """Kronecker product, as `numpy.kron`: each element of one array times all of the other; one launch.

    Args:
        a: Array of any shape; the one of fewer axes gets axes of one element in front.
        b: Array of the same dtype.

    Returns:
        The products: each axis is as long as those of `a` and `b` multiplied.
    """
    check_operands("kron", a=a, b=b)
    axes = max(a.ndim, b.ndim)
    a, b = (array[(None,) * (axes - array.ndim)] for array in (a, b))
    product = await _KRON(a[(slice(None), None) * axes], b[(None, slice(None)) * axes])
    return product.reshape([first * second for first, second in zip(a.shape, b.shape, strict=True)])


async def cross(x1: Operand, x2: Operand, /, *, axis: int = -1) -> AccelRef:
    """Cross products of vectors of three elements, as `numpy.linalg.cross`; one launch.

    Args:
        x1: Array of a numeric dtype.
        x2: Array of the same dtype; the shapes broadcast, but for the axis.
        axis: Axis that holds the vectors.

    Returns:
        The vectors, along the same axis.

    Raises:
        ValueError: Vectors that have not three elements, or an axis that there is not.
    """
    check_operands("cross", x1=x1, x2=x2)
    first, second = _last("cross", x1, axis), _last("cross", x2, axis)
    try:
        shape = np.broadcast_shapes(first.shape, second.shape)
    except ValueError:
        shape = ()
    if first.shape[-1:] != (3,) or second.shape[-1:] != (3,) or not shape:
        raise ValueError(
            f"cross: axis {axis} must have three elements, and the others must broadcast, got shapes "
            f"{x1.shape} and {x2.shape}"
        )
    vectors = (viewed(each, lambda array: np.broadcast_to(array, shape)) for each in (first, second))
    product = await _cross(len(shape))(*vectors, shape=shape)
    place = normalize_axis_index(axis, len(shape))
    order = list(range(len(shape) - 1))
    order.insert(place, len(shape) - 1)
    return on_device(permuted(product, order))


async def trace(
    x: Operand, /, *, offset: int = 0, dtype: DTypeLike | None = None, out: AccelRef | None = None
) -> AccelRef:
    """Sums of diagonals of matrices, as `numpy.linalg.trace`; one launch.

    Args:
        x: Array of shape (..., m, n).
        offset: Which diagonal, see `diagonal`.
        dtype: Type that the elements are converted to before they are added; by default that of `x`, of whole
            numbers int64 or uint64.
        out: Array to write to, of the same kind of dtype: the result is converted to it.

    Returns:
        The sums, of shape (...); 0 for a diagonal that there is not.

    Raises:
        numpy.linalg.LinAlgError: `x` has less than two axes.
    """
    check_operands("trace", x=x)
    check_matrices("trace", x)
    along = diagonal(on_device(x), offset=offset)
    return await _sum("trace", "x", None if dtype is None else DType.of(dtype).value)(along, axis=-1, out=out)


async def tensordot(
    x1: Operand, x2: Operand, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2
) -> AccelRef:
    """Sum of products over axes of two arrays, as `numpy.tensordot`; by one `matmul`.

    An operand whose axes cannot be merged where they lie is copied first. Without axes to add along, it is
    one launch that multiplies.

    Args:
        x1: Array of a dtype that `matmul` takes.
        x2: Array of the same dtype.
        axes: How many axes: the last ones of `x1` and the first ones of `x2`, in order. Or which ones of
            `x1`, and which ones of `x2`.

    Returns:
        The sums: first the other axes of `x1`, then those of `x2`.

    Raises:
        ValueError: Axes that there are not, that are named twice, or whose lengths differ.
    """
    name = "tensordot"
    check_operands(name, x1=x1, x2=x2)
    if isinstance(axes, (int, np.integer)):
        if not 0 <= axes <= min(x1.ndim, x2.ndim):
            raise ValueError(f"{name}: axes must be from 0 to {min(x1.ndim, x2.ndim)}, got {axes}")
        axes = range(x1.ndim - axes, x1.ndim), range(axes)
    try:
        first, second = (normalize_axis_tuple(of, x.ndim) for of, x in zip(axes, (x1, x2), strict=True))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: axes {axes} of shapes {x1.shape} and {x2.shape}: {error}") from None
    if [x1.shape[axis] for axis in first] != [x2.shape[axis] for axis in second]:
        raise ValueError(f"{name}: shapes {x1.shape} and {x2.shape} differ along axes {first} and {second}")
    # An axis that is added along has one number in both.
    left = _Factor(tuple(range(x1.ndim)), x1)
    right = _Factor(tuple(_label(axis, first, second) for axis in range(x2.ndim)), x2)
    keep = frozenset[object]({*left.labels, *right.labels} - set(first))
    return on_device((await _contract(left, right, keep)).array)


def _label(axis: int, first: Sequence[int], second: Sequence[int]) -> int:
    """Return the axis of the first operand that one of the second belongs to; or else a number below 0."""
    return first[second.index(axis)] if axis in second else -1 - axis


async def einsum(subscripts: str, /, *operands: Operand) -> AccelRef:
    """Sum of products by Einstein's convention, as `numpy.einsum`: ``einsum("ij,jk->ik", a, b)``.

    More than two operands are multiplied in the order that `numpy.einsum_path` finds. Each step is one
    launch: a product of elements where nothing is added, a sum of products where nothing else is left, and
    else `matmul`; an operand whose axes cannot be merged where they lie is copied first, and an axis that no
    other has is added along first. The arrays between the steps are released as the next one is done.

    Args:
        subscripts: One letter for each axis of each operand, terms separated by commas. ``...`` stands for
            axes that broadcast. A letter twice in a term takes the diagonal. Behind ``->`` are the letters of
            the result, in order; without it, those that are there once, sorted.
        *operands: Arrays of one dtype, one for each term. An axis of one element broadcasts.

    Returns:
        The result. Of one operand that nothing is added of, it is a view of that; in general a view of any
        strides of new memory.

    Raises:
        TypeError: There is no operand.
        ValueError: A term that does not fit its operand, letters behind ``->`` that no term has or that are
            there twice, or lengths that differ.
    """
    given = {f"operands[{number}]": each for number, each in enumerate(operands)}
    check_operands("einsum", **given)
    terms, output = _terms(subscripts, [each.shape for each in operands])
    sizes = _sizes(terms, operands)
    trees: list[_Factor | _Product] = [
        _distinct(term, each, sizes) for term, each in zip(terms, operands, strict=True)
    ]
    for high, low in _path([each.labels for each in trees], output, sizes):
        trees.append(_Product(trees.pop(high), trees.pop(low)))
    result = await _evaluate(trees[0], frozenset(output))
    # Only a single operand still has axes that are not wanted.
    result = await _summed(result, frozenset(output), lambda array: array)
    return on_device(result.along(output))


@attrs.frozen(eq=False)
class _Factor:
    """An array, and a label of each of its axes."""

    labels: tuple[object, ...]
    array: Operand

    def extents(self, labels: Iterable[object]) -> list[int]:
        """Return how many elements there are along axes."""
        return [self.array.shape[self.labels.index(label)] for label in labels]

    def along(self, labels: Iterable[object]) -> Operand:
        """View the array with its axes in this order, and one element where it has no such axis."""
        wanted = tuple(labels)
        view = permuted(self.array, [self.labels.index(label) for label in wanted if label in self.labels])
        return view[(*[slice(None) if label in self.labels else None for label in wanted], ...)]


@attrs.frozen(eq=False)
class _Product:
    """A product that is yet to be made."""

    left: _Factor | _Product
    right: _Factor | _Product

    @property
    def labels(self) -> tuple[object, ...]:
        """Those of all its factors."""
        return (*self.left.labels, *self.right.labels)


async def _evaluate(tree: _Factor | _Product, keep: frozenset[object]) -> _Factor:
    """Make a product, and release the products that it is made of."""
    if isinstance(tree, _Factor):
        return tree
    with intermediates() as made:
        factors: list[_Factor] = []
        for part, other in ((tree.left, tree.right), (tree.right, tree.left)):
            factors.append(await _evaluate(part, keep.union(other.labels)))
            if isinstance(part, _Product):
                made(on_device(factors[-1].array))
        left, right = factors
        return await _contract(left, right, keep)


async def _contract(left: _Factor, right: _Factor, keep: frozenset[object]) -> _Factor:
    """Multiply two factors, and add along the axes that are not kept."""
    with intermediates() as made:
        left = await _summed(left, keep.union(right.labels), made)
        right = await _summed(right, keep.union(left.labels), made)
        rows = [label for label in left.labels if label not in right.labels]
        columns = [label for label in right.labels if label not in left.labels]
        batch = [label for label in left.labels if label in right.labels and label in keep]
        inner = [label for label in left.labels if label not in keep]
        labels = (*batch, *rows, *columns)
        if not inner:
            return _Factor(labels, await _PRODUCT(left.along(labels), right.along(labels)))
        if not rows and not columns:
            whole = left.along(labels + tuple(inner)), right.along(labels + tuple(inner))
            axes = range(len(labels), len(labels) + len(inner))
            return _Factor(
                labels, await _sum("einsum", "x * y", DType.of(left.array.dtype).value)(*whole, axis=axes)
            )
        first = await _merged(left, batch, rows, inner, made)
        second = await _merged(right, batch, inner, columns, made)
        product = await matmul(first, second)
        shape = left.extents([*batch, *rows]) + right.extents(columns)
    return _Factor(labels, product.reshape(shape))


_Made = Callable[[AccelRef], AccelRef]


async def _summed(factor: _Factor, keep: frozenset[object], made: _Made) -> _Factor:
    """Add along the axes that nothing needs any more."""
    axes = [axis for axis, label in enumerate(factor.labels) if label not in keep]
    if not axes:
        return factor
    add = _sum("einsum", "x", DType.of(factor.array.dtype).value)
    labels = tuple(label for label in factor.labels if label in keep)
    return _Factor(labels, made(await add(factor.array, axis=axes)))


async def _merged(
    factor: _Factor, batch: Sequence[object], first: Sequence[object], second: Sequence[object], made: _Made
) -> Operand:
    """Make a stack of matrices, by a copy where no view does."""
    view = factor.along((*batch, *first, *second))
    merged = math.prod(factor.extents(first)), math.prod(factor.extents(second))
    shape = (*factor.extents(batch), *merged)
    if not isinstance(view, AccelRef):
        return view.reshape(shape)
    try:
        return view.reshape(shape)
    except NoViewError:
        return made(await view.copy()).reshape(shape)


def _terms(subscripts: str, shapes: Sequence[tuple[int, ...]]) -> tuple[list[str], str]:
    """Read the subscripts; letters that are not used stand for the axes of ``...``."""
    if not isinstance(subscripts, str):
        raise TypeError(f"einsum: subscripts must be a text such as 'ij,jk->ik', got {subscripts!r}")
    told = f"einsum: subscripts {subscripts!r}"
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(shapes):
        raise ValueError(f"{told} have {len(terms)} terms, got {len(shapes)} operands")
    spare = "".join(letter for letter in string.ascii_letters if letter not in subscripts)
    most = 0
    for number, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        letters = _letters(told, term)
        more = len(shape) - len(letters)
        if more < 0 or (more and letters == term):
            raise ValueError(f"{told}: the term {term!r} does not fit operands[{number}] of shape {shape}")
        if more > len(spare):
            raise ValueError(f"{told}: more than {len(string.ascii_letters)} axes")
        terms[number] = term.replace("...", spare[:more][::-1])
        most = max(most, more)
    others = spare[:most][::-1]
    used = "".join(terms)
    if not arrow:
        once = sorted(letter for letter in used if used.count(letter) == 1 and letter not in others)
        return terms, others + "".join(once)
    letters = _letters(told, output)
    if len(set(letters)) < len(letters) or not set(letters) <= set(used):
        raise ValueError(f"{told}: letters behind -> must each be in a term, and there once, got {output!r}")
    if others and letters == output:
        raise ValueError(f"{told}: behind -> there is no ..., which stands for {most} axes of the operands")
    return terms, output.replace("...", others)


def _letters(told: str, term: str) -> str:
    """Return the letters of a term, without ``...``."""
    letters = term.replace("...", "", 1)
    for letter in letters:
        if letter not in string.ascii_letters:
            raise ValueError(f"{told}: in the term {term!r} {letter!r} is no letter")
    return letters


def _sizes(terms: Sequence[str], operands: Sequence[Operand]) -> dict[str, int]:
    """Find how many elements there are along each label; one element broadcasts."""
    sizes: dict[str, int] = {}
    for number, (term, operand) in enumerate(zip(terms, operands, strict=True)):
        for label, size in zip(term, operand.shape, strict=True):
            known = sizes.get(label, 1)
            if 1 not in (known, size) and known != size:
                raise ValueError(
                    f"einsum: operands[{number}] of shape {operand.shape} has {size} elements along an axis "
                    f"of the term {term!r} where others have {known}"
                )
            sizes[label] = size if known == 1 else known
    return sizes


def _distinct(term: str, operand: Operand, sizes: Mapping[str, int]) -> _Factor:
    """Take the element of axes that broadcast, and the diagonal where a label is there twice."""
    index = [
        0 if size != sizes[label] else slice(None) for label, size in zip(term, operand.shape, strict=True)
    ]
    view = operand[(*index, ...)]
    letters = [label for label, part in zip(term, index, strict=True) if part != 0]
    labels = tuple(dict.fromkeys(letters))
    strides = [
        sum(step for letter, step in zip(letters, view.strides, strict=True) if letter == label)
        for label in labels
    ]
    shape = [sizes[label] for label in labels]
    return _Factor(labels, viewed(view, lambda array: as_strided(array, shape, strides)))


def _path(
    terms: Sequence[Sequence[object]], output: str, sizes: Mapping[str, int]
) -> Iterator[tuple[int, int]]:
    """Say which two of the terms are multiplied next, the later one first; their product comes last."""
    count = len(terms)
    if count < 3:
        if count == 2:
            yield 1, 0
        return
    texts = ["".join(map(str, term)) for term in terms]
    # Arrays of these shapes, in the memory of one element.
    shadows = [np.broadcast_to(np.empty(()), [sizes[label] for label in text]) for text in texts]
    path = np.einsum_path(f"{','.join(texts)}->{output}", *shadows, optimize="greedy")[0][1:]
    for step in path:
        # NumPy multiplies more than two at once where an order makes it no cheaper.
        *others, low, high = sorted(step)
        yield high, low
        for other in reversed(others):
            count -= 1
            yield count - 1, other
        count -= 1


def _last(name: str, x: Operand, axis: int) -> Operand:
    """View an array with one axis as the last one."""
    try:
        place = normalize_axis_index(axis, x.ndim)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: axis {axis!r} of shape {x.shape}: {error}") from None
    return permuted(x, [*(number for number in range(x.ndim) if number != place), place])


@functools.cache
def _cross(axes: int) -> Elementwise[AccelRef]:
    """Make the cross product along the last one of so many axes."""
    *others, last = [f"i({axis})" for axis in range(axes)]
    one, two = (", ".join([*others, f"({last} + {step}) % 3"]) for step in (1, 2))
    return Elementwise(
        f"x[{one}] * y[{two}] - x[{two}] * y[{one}]", inputs="xy", operation="linalg.cross", library=ARRAYS
    )


@functools.cache
def _sum(name: str, text: str, dtype: str | None) -> Reduction:
    return Reduction(text, dtype=dtype, operation=f"linalg.{name}", library=ARRAYS)
