"""Sums of products by Einstein's convention, made of expressions and of a capability's own product."""

from __future__ import annotations

import functools
import string
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import attrs
from numpy.lib.stride_tricks import as_strided

from ..backends.base import DType, OutOfMemoryError
from ..backends.base.ops import ContractionSpec, contraction_terms
from ..backends.base.subscripts import ContractionPath, Optimize, extents_of, find_path, parse_subscripts
from ..devices import AccelRef, Device, Operand, Operation, Planned, Planner, device_of
from ..devices.base._refusals import whole
from ._elementwise import Elementwise
from ._intermediates import intermediates
from ._reduction import Reduction
from ._views import check_operands, on_device, permuted, viewed

__all__ = ["Contract", "Contracting", "Factor", "Groups", "Made", "contraction_path", "factors_of"]

Made: TypeAlias = Callable[[AccelRef], AccelRef]
"""Takes an array that is released when the function ends, and returns it."""


@attrs.frozen(eq=False)
class Factor:
    """An array, and a label of each of its axes.

    Attributes:
        labels: One for each axis, each another one.
        array: The array.
        is_made: Whether it is an intermediate one, to be released.
    """

    labels: tuple[object, ...]
    array: Operand
    is_made: bool = False

    def extents(self, labels: Iterable[object]) -> list[int]:
        """Return how many elements there are along axes."""
        return [self.array.shape[self.labels.index(label)] for label in labels]

    def along(self, labels: Iterable[object]) -> Operand:
        """View the array with its axes in this order, and one element where it has no such axis."""
        wanted = tuple(labels)
        if wanted == self.labels:
            return self.array
        view = permuted(self.array, [self.labels.index(label) for label in wanted if label in self.labels])
        if len(wanted) == len(self.labels):
            return view
        return view[(*[slice(None) if label in self.labels else None for label in wanted], ...)]


@attrs.frozen
class Groups:
    """The labels of two factors, by what becomes of them.

    Attributes:
        batch: Both have them, and the result has.
        rows: Only the left one has them, and the result.
        columns: Only the right one has them, and the result.
        inner: Both have them, and they are added along.
    """

    batch: tuple[object, ...]
    rows: tuple[object, ...]
    columns: tuple[object, ...]
    inner: tuple[object, ...]

    @classmethod
    def of(cls, left: Factor, right: Factor, keep: frozenset[object]) -> Groups:
        """Divide the labels; none is left that only one factor has and nothing keeps."""
        shared = [label for label in left.labels if label in right.labels]
        return cls(
            batch=tuple(label for label in shared if label in keep),
            rows=tuple(label for label in left.labels if label not in right.labels),
            columns=tuple(label for label in right.labels if label not in left.labels),
            inner=tuple(label for label in shared if label not in keep),
        )

    @property
    def kept(self) -> tuple[object, ...]:
        """Those of the result."""
        return (*self.batch, *self.rows, *self.columns)


@attrs.define(eq=False, on_setattr=None)
class Contract(Operation[Any, AccelRef]):
    """Asks for a contraction of two tensors that is a product of matrices.

    It is here because several capabilities ask for it. `ta.tensor.contract` says what the fields mean.
    """

    # A text, because capabilities do not import one another.
    library: ClassVar[str] = "trio_accel.tensor:TensorActor"

    subscripts: str
    a: Operand
    b: Operand
    c: Operand | None = None
    alpha: complex = 1.0
    beta: complex = 0.0
    out: AccelRef | None = None

    @classmethod
    def of(cls, left: Factor, right: Factor, groups: Groups) -> Contract:
        """Make the message for two factors with up to 52 different labels."""
        letters = dict(zip(dict.fromkeys((*left.labels, *right.labels)), string.ascii_letters, strict=False))
        rows = (left.labels, right.labels, groups.kept)
        terms = ["".join([letters[label] for label in labels]) for labels in rows]
        return cls("{},{}->{}".format(*terms), left.array, right.array)

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return "tensor.Contract"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Plan by the letters, which no line of shapes can say."""
        name, read = planner.name, planner.read
        a, b = read("a", self.a), read("b", self.b)
        c = None if self.c is None else read("c", self.c)
        if a.dtype is not b.dtype or (c is not None and c.dtype is not a.dtype):
            planner.refuse_dtypes(a=a, b=b, c=c)
        left, right, output, shape = contraction_terms(name, self.subscripts, a.shape, b.shape)
        if c is not None and c.shape != shape:
            raise ValueError(f"{name}: c must have shape {shape}, got shape {c.shape}")
        alpha = planner.factor("alpha", self.alpha, a.dtype)
        beta = planner.factor("beta", self.beta, a.dtype)
        if c is None and beta:
            raise ValueError(f"{name}: beta must be 0 without c, got {self.beta!r}")
        out = planner.output(shape, a.dtype, self.out)
        if self.out is not None:
            planner.distinct("out", out.spec, a=a, b=b)
            if c is not None and c != out.spec:
                planner.distinct("out", out.spec, c=c)
        return Planned(ContractionSpec(f"{left},{right}->{output}", alpha, beta, a, b, c, out.spec), out)


@attrs.frozen
class Contracting:
    """How a capability multiplies.

    Attributes:
        operation: Name of its operations, such as ``"linalg.einsum"``; the function is the second part.
        library: Import path of the actor of expressions.
        multiply: Makes a product that is a sum of products, of arrays that are not all of it: the result has
            the axes of `Groups.kept`.
    """

    operation: str
    library: str
    multiply: Callable[[Factor, Factor, Groups, Made], Awaitable[AccelRef]]

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.operation.partition(".")[2]

    async def sum(
        self,
        subscripts: str,
        operands: Sequence[Operand],
        optimize: Optimize,
        memory_limit: int | None,
    ) -> AccelRef:
        """Compute a sum of products of any number of arrays.

        Raises:
            TypeError, ValueError: Subscripts, arrays, or a path that are not right.
            OutOfMemoryError: No path was found that fits into memory. Nothing was launched.
        """
        name = self.name
        check_operands(name, **{f"operands[{number}]": each for number, each in enumerate(operands)})
        factors, output, extents = factors_of(name, subscripts, operands)
        path = _path(name, factors, output, extents, optimize, memory_limit)
        _check_memory(name, path, memory_limit, device_of(name, *operands))
        result = frozenset[object](output)
        try:
            for low, high in path.steps:
                # A product that is made of others takes their place.
                with intermediates() as made:
                    right, left = factors.pop(high), factors.pop(low)
                    for used in (left, right):
                        if used.is_made:
                            made(on_device(used.array))
                    rest = result.union(*(one.labels for one in factors))
                    product = await self.pair(left, right, rest)
                factors.append(attrs.evolve(product, is_made=True))
            # Only a single operand still has axes that are not wanted.
            (factor,) = factors
            return on_device((await self._summed(factor, result, lambda array: array)).along(output))
        except BaseException:
            for one in factors:
                if one.is_made:
                    on_device(one.array).release()
            raise

    async def pair(self, left: Factor, right: Factor, keep: frozenset[object]) -> Factor:
        """Multiply two factors, and add along the axes that are not kept."""
        with intermediates() as made:
            left = await self._summed(left, keep.union(right.labels), made)
            right = await self._summed(right, keep.union(left.labels), made)
            groups = Groups.of(left, right, keep)
            labels, inner = groups.kept, groups.inner
            if not inner:
                return Factor(labels, await self._times(left.along(labels), right.along(labels)))
            if not groups.rows and not groups.columns:
                whole = left.along(labels + inner), right.along(labels + inner)
                axes = range(len(labels), len(labels) + len(inner))
                added = _sum(self.operation, self.library, "x * y", DType.of(left.array.dtype).value)
                return Factor(labels, await added(*whole, axis=axes))
            return Factor(labels, await self.multiply(left, right, groups, made))

    async def _summed(self, factor: Factor, keep: frozenset[object], made: Made) -> Factor:
        """Add along the axes that nothing needs any more."""
        axes = [axis for axis, label in enumerate(factor.labels) if label not in keep]
        if not axes:
            return factor
        add = _sum(self.operation, self.library, "x", DType.of(factor.array.dtype).value)
        labels = tuple(label for label in factor.labels if label in keep)
        return Factor(labels, made(await add(factor.array, axis=axes)))

    @property
    def _times(self) -> Elementwise[AccelRef]:
        return _product(self.operation, self.library)


def factors_of(
    name: str, subscripts: str, operands: Sequence[Operand], arguments: Sequence[str] = ()
) -> tuple[list[Factor], str, dict[str, int]]:
    """Read subscripts, and take the diagonal where a letter is twice in a term.

    Returns:
        The operands, whose letters are different ones; the letters of the result; and the elements along
        each letter.

    Raises:
        TypeError, ValueError: As `parse_subscripts` and `extents_of` raise them.
    """
    shapes = [each.shape for each in operands]
    terms, output = parse_subscripts(name, subscripts, shapes, arguments)
    extents = extents_of(name, terms, shapes, arguments)
    factors = [_distinct(term, each, extents) for term, each in zip(terms, operands, strict=True)]
    return factors, output, extents


def contraction_path(
    name: str, subscripts: str, operands: Sequence[Operand], optimize: Optimize, memory_limit: int | None
) -> ContractionPath:
    """Find the path of a sum of products, as `Contracting.sum` does; nothing is launched, or refused."""
    factors, output, extents = factors_of(name, subscripts, operands)
    return _path(name, factors, output, extents, optimize, memory_limit)


def _path(
    name: str,
    factors: Sequence[Factor],
    output: str,
    extents: Mapping[str, int],
    optimize: Optimize,
    memory_limit: int | None,
) -> ContractionPath:
    if memory_limit is not None and whole(name, "memory_limit", memory_limit) < 0:
        raise ValueError(f"{name}: memory_limit must be a number of bytes, got {memory_limit!r}")
    if not factors:
        raise TypeError(f"{name}: there is no operand")
    terms = ["".join(map(str, factor.labels)) for factor in factors]
    size = DType.of(factors[0].array.dtype).itemsize
    return find_path(
        name, terms, output, extents, itemsize=size, optimize=optimize, memory_limit=memory_limit
    )


def _check_memory(name: str, path: ContractionPath, memory_limit: int | None, device: Device) -> None:
    """Refuse a path before anything is launched.

    Raises:
        OutOfMemoryError: Its arrays take more than the caller allows, or than the device has.
    """
    limit, what = memory_limit, "memory_limit"
    if limit is None:
        own = device.options.memory_limit
        limit, what = device.info.total_memory if own is None else own, "the device's memory"
    if path.peak > limit:
        raise OutOfMemoryError(
            f"{name}: no path was found whose arrays fit into {what} of {limit} bytes: the best one takes "
            f"{path.peak} bytes at a time, and its largest array {path.largest}",
            requested=path.peak,
            free=limit,
            total=limit,
            device=device.name,
        )


def _distinct(term: str, operand: Operand, extents: Mapping[str, int]) -> Factor:
    """Take the element of axes that broadcast, and the diagonal where a label is there twice."""
    index = [
        0 if size != extents[label] else slice(None) for label, size in zip(term, operand.shape, strict=True)
    ]
    view = operand[(*index, ...)] if 0 in index else operand
    letters = [label for label, part in zip(term, index, strict=True) if part != 0]
    labels = tuple(dict.fromkeys(letters))
    if len(labels) == len(letters):
        return Factor(labels, view)
    strides = [
        sum(step for letter, step in zip(letters, view.strides, strict=True) if letter == label)
        for label in labels
    ]
    shape = [extents[label] for label in labels]
    return Factor(labels, viewed(view, lambda array: as_strided(array, shape, strides)))


@functools.cache
def _product(operation: str, library: str) -> Elementwise[AccelRef]:
    return Elementwise("x * y", operation=operation, library=library)


@functools.cache
def _sum(operation: str, library: str, text: str, dtype: str) -> Reduction:
    return Reduction(text, dtype=dtype, operation=operation, library=library)
