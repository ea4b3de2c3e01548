"""Sums of products by Einstein's convention, computed by expressions and a capability's own product."""

from __future__ import annotations

import functools
import string
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import attrs
from numpy.lib.stride_tricks import as_strided

from ..backends.base import DType, OutOfMemoryError, name_function
from ..backends.base.contract.ops import ContractionSpec, contraction_terms
from ..backends.base.contract.subscripts import (
    ContractionPath,
    Optimize,
    extents_of,
    find_path,
    parse_subscripts,
)
from ..devices import AccelRef, Device, Operand, Operation, Planned, Planner, bounded_integer, device_of
from ._expression import Elementwise
from ._reduction import Reduction
from ._views import check_operands, intermediates, on_device, permuted, viewed

__all__ = [
    "Contract",
    "Contracting",
    "ContractionFactor",
    "Groups",
    "Track",
    "contraction_path",
    "factors_of",
]

_expression = functools.cache(Elementwise[AccelRef])
_reduction = functools.cache(Reduction)

Track: TypeAlias = Callable[[AccelRef], AccelRef]
"""Takes an array that is released when the function ends, and returns it."""


@attrs.frozen(eq=False)
class ContractionFactor:
    """An array, and a label for each axis.

    Attributes:
        labels: One for each axis, all different.
        array: The array.
        is_made: Whether it is an intermediate one, to be released.
    """

    labels: tuple[object, ...]
    array: Operand
    is_made: bool = False

    def extents(self, labels: Iterable[object]) -> list[int]:
        """Return the number of elements along axes."""
        return [self.array.shape[self.labels.index(label)] for label in labels]

    def along(self, labels: Iterable[object]) -> Operand:
        """View the array with its axes in this order, and one element for each missing axis."""
        order = tuple(labels)
        if order == self.labels:
            return self.array
        view = permuted(self.array, [self.labels.index(label) for label in order if label in self.labels])
        if len(order) == len(self.labels):
            return view
        return view[(*[slice(None) if label in self.labels else None for label in order], ...)]


@attrs.frozen
class Groups:
    """The labels of two factors, by their role.

    Attributes:
        batch: In both factors and in the result.
        rows: In the left factor and in the result.
        columns: In the right factor and in the result.
        inner: In both factors, which are added along them.
    """

    batch: tuple[object, ...]
    rows: tuple[object, ...]
    columns: tuple[object, ...]
    inner: tuple[object, ...]

    @classmethod
    def of(cls, lhs: ContractionFactor, rhs: ContractionFactor, keep: frozenset[object]) -> Groups:
        """Divide the labels; none is left that only one factor has and nothing keeps."""
        shared = [label for label in lhs.labels if label in rhs.labels]
        return cls(
            batch=tuple(label for label in shared if label in keep),
            rows=tuple(label for label in lhs.labels if label not in rhs.labels),
            columns=tuple(label for label in rhs.labels if label not in lhs.labels),
            inner=tuple(label for label in shared if label not in keep),
        )

    @property
    def result_labels(self) -> tuple[object, ...]:
        """The labels of the result."""
        return (*self.batch, *self.rows, *self.columns)


@attrs.define(eq=False, on_setattr=None)
class Contract(Operation[Any, AccelRef]):
    """A tensor contraction that is a matrix product.

    It is here because several capabilities use it. `ta.tensor.contract` explains the fields.
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
    def of(cls, lhs: ContractionFactor, rhs: ContractionFactor, groups: Groups) -> Contract:
        """Make the message for two factors with up to 52 different labels."""
        letters = dict(zip(dict.fromkeys((*lhs.labels, *rhs.labels)), string.ascii_letters, strict=False))
        rows = (lhs.labels, rhs.labels, groups.result_labels)
        terms = ["".join([letters[label] for label in labels]) for labels in rows]
        return cls("{},{}->{}".format(*terms), lhs.array, rhs.array)

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return "tensor.Contract"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Plan by the letters, because no line of shapes can express this."""
        read = planner.read
        a, b = read("a", self.a), read("b", self.b)
        c = None if self.c is None else read("c", self.c)
        if a.dtype is not b.dtype or (c is not None and c.dtype is not a.dtype):
            planner.refuse_dtypes(a=a, b=b, c=c)
        *terms, shape = contraction_terms(planner.name, self.subscripts, a.shape, b.shape)
        if c is not None and c.shape != shape:
            raise ValueError(f"{planner.name}: c must have shape {shape}, got shape {c.shape}")
        alpha, beta = (planner.factor(name, getattr(self, name), a.dtype) for name in ("alpha", "beta"))
        out = planner.output(shape, a.dtype, self.out)
        if self.out is not None:
            operands = {"a": a, "b": b} if c is None or c == out.spec else {"a": a, "b": b, "c": c}
            planner.distinct("out", out.spec, **operands)
        return Planned(ContractionSpec("{},{}->{}".format(*terms), alpha, beta, a, b, c, out.spec), out)


name_function("tensor.Contract", "tensor.contract")


@attrs.frozen
class Contracting:
    """The way a capability multiplies.

    Attributes:
        operation: Name of its operations, such as ``"linalg.einsum"``; the function is the second part.
        multiply: Makes a product with inner axes, and with rows or columns; the result has the axes of
            `Groups.result_labels`.
    """

    operation: str
    multiply: Callable[[ContractionFactor, ContractionFactor, Groups, Track], Awaitable[AccelRef]]

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.operation.partition(".")[2]

    async def sum(
        self, subscripts: str, operands: Sequence[Operand], optimize: Optimize, memory_limit: int | None
    ) -> AccelRef:
        """Sum the products of any number of arrays.

        Raises:
            TypeError, ValueError: The subscripts, the arrays, or the path are not valid.
            OutOfMemoryError: No path was found that fits into memory. Nothing was launched.
        """
        name = self.name
        check_operands(name, **{f"operands[{number}]": operand for number, operand in enumerate(operands)})
        factors, output, path = _planned(name, subscripts, operands, optimize, memory_limit)
        _check_memory(name, path, memory_limit, device_of(name, *operands))
        result = frozenset[object](output)
        try:
            for low, high in path.steps:
                # A product replaces the factors that it is made of.
                with intermediates() as track:
                    rhs, lhs = factors.pop(high), factors.pop(low)
                    for used in (lhs, rhs):
                        if used.is_made:
                            track(on_device(used.array))
                    rest = result.union(*(factor.labels for factor in factors))
                    product = await self.pair(lhs, rhs, rest)
                factors.append(attrs.evolve(product, is_made=True))
            # Only a single operand still has axes that the result lacks.
            (factor,) = factors
            return on_device((await self._summed(factor, result, lambda array: array)).along(output))
        except BaseException:
            for remaining in factors:
                if remaining.is_made:
                    on_device(remaining.array).release()
            raise

    async def pair(
        self, lhs: ContractionFactor, rhs: ContractionFactor, keep: frozenset[object]
    ) -> ContractionFactor:
        """Multiply two factors, and add along the axes that are not kept."""
        with intermediates() as track:
            lhs = await self._summed(lhs, keep.union(rhs.labels), track)
            rhs = await self._summed(rhs, keep.union(lhs.labels), track)
            groups = Groups.of(lhs, rhs, keep)
            labels, inner, operation = groups.result_labels, groups.inner, self.operation
            if not inner:
                multiply = _expression("x * y", operation=operation)
                return ContractionFactor(labels, await multiply(lhs.along(labels), rhs.along(labels)))
            if not groups.rows and not groups.columns:
                aligned = lhs.along(labels + inner), rhs.along(labels + inner)
                axes = range(len(labels), len(labels) + len(inner))
                added = _reduction("x * y", "sum", dtype=DType.of(lhs.array.dtype).value, operation=operation)
                return ContractionFactor(labels, await added(*aligned, axis=axes))
            return ContractionFactor(labels, await self.multiply(lhs, rhs, groups, track))

    async def _summed(
        self, factor: ContractionFactor, keep: frozenset[object], track: Track
    ) -> ContractionFactor:
        """Add along the axes that nothing needs any longer."""
        axes = [axis for axis, label in enumerate(factor.labels) if label not in keep]
        if not axes:
            return factor
        add = _reduction("x", "sum", dtype=DType.of(factor.array.dtype).value, operation=self.operation)
        labels = tuple(label for label in factor.labels if label in keep)
        return ContractionFactor(labels, track(await add(factor.array, axis=axes)))


def factors_of(
    name: str, subscripts: str, operands: Sequence[Operand], arguments: Sequence[str] = ()
) -> tuple[list[ContractionFactor], str, dict[str, int]]:
    """Parse subscripts, and take the diagonal if a letter is twice in a term.

    Returns:
        The operands, each with different letters; the letters of the result; and the elements along each
        letter.

    Raises:
        TypeError, ValueError: As `parse_subscripts` and `extents_of` raise them.
    """
    shapes = [operand.shape for operand in operands]
    terms, output = parse_subscripts(name, subscripts, shapes, arguments)
    extents = extents_of(name, terms, shapes, arguments)
    factors = [_distinct(term, operand, extents) for term, operand in zip(terms, operands, strict=True)]
    return factors, output, extents


def contraction_path(
    name: str, subscripts: str, operands: Sequence[Operand], optimize: Optimize, memory_limit: int | None
) -> ContractionPath:
    """Find the path for summing products, as `Contracting.sum` does; launch and refuse nothing."""
    return _planned(name, subscripts, operands, optimize, memory_limit)[2]


def _planned(
    name: str, subscripts: str, operands: Sequence[Operand], optimize: Optimize, memory_limit: int | None
) -> tuple[list[ContractionFactor], str, ContractionPath]:
    """Parse subscripts, and find the path; also return the factors and the letters of the result."""
    factors, output, extents = factors_of(name, subscripts, operands)
    if memory_limit is not None and bounded_integer(name, "memory_limit", memory_limit) < 0:
        raise ValueError(f"{name}: memory_limit must be a number of bytes, got {memory_limit!r}")
    if not factors:
        raise TypeError(f"{name}: there is no operand")
    terms = ["".join(map(str, factor.labels)) for factor in factors]
    size = DType.of(factors[0].array.dtype).itemsize
    find = functools.partial(find_path, itemsize=size, optimize=optimize, memory_limit=memory_limit)
    return factors, output, find(name, terms, output, extents)


def _check_memory(name: str, path: ContractionPath, memory_limit: int | None, device: Device) -> None:
    """Refuse a path before anything is launched.

    Raises:
        OutOfMemoryError: Its arrays take more than the caller allows, or than the device has.
    """
    limit, label = memory_limit, "memory_limit"
    if limit is None:
        device_limit = device.options.memory_limit
        limit, label = (
            device.info.total_memory if device_limit is None else device_limit,
            "the device's memory",
        )
    if path.peak > limit:
        raise OutOfMemoryError(
            f"{name}: no path was found whose arrays fit into {label} of {limit} bytes: the best one takes "
            f"{path.peak} bytes at a time, and its largest array {path.largest}",
            requested=path.peak,
            free=limit,
            total=limit,
            device=device.name,
        )


def _distinct(term: str, operand: Operand, extents: Mapping[str, int]) -> ContractionFactor:
    """Take the element of axes that broadcast, and the diagonal where a label is there twice."""
    index = [
        0 if size != extents[label] else slice(None) for label, size in zip(term, operand.shape, strict=True)
    ]
    view = operand[(*index, ...)] if 0 in index else operand
    letters = [label for label, part in zip(term, index, strict=True) if part != 0]
    labels = tuple(dict.fromkeys(letters))
    if len(labels) == len(letters):
        return ContractionFactor(labels, view)
    strides = [
        sum(step for letter, step in zip(letters, view.strides, strict=True) if letter == label)
        for label in labels
    ]
    shape = [extents[label] for label in labels]
    return ContractionFactor(labels, viewed(view, lambda array: as_strided(array, shape, strides)))
