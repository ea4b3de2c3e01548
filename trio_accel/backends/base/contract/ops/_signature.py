"""One line of shapes and dtypes: its grammar, and how arrays are held against it.

    a(..., m, n), b(..., n, c?) -> x(..., n, c?), piv: int32(..., min(m, n))

Each array has a name, and letters for its last extents. A letter is the same number in the whole line.

* ``...`` are leading axes that broadcast, ``s...`` leading axes with the same extents everywhere, and ``*``
  is a whole shape, the same everywhere.
* A letter with ``?`` is absent if the array has too few axes, as in the signatures of NumPy's generalized
  ufuncs. A letter with ``>0`` is not 0.
* ``^trans`` after a name means that the letters describe op(array), by the BLAS's letter in the parameter
  `trans`.
* ``: real``, ``: complex`` or the name of a dtype marks an array with a dtype of its own. Arrays with
  ``: index`` are all of int32, or all of int64.
* ``m+1`` is one more than the letter m, which the line must name before.
* ``matrix(m, n), matrix.data(e)`` are the shape of an operand that consists of several arrays, and one of
  these.

New arrays are on the right. A parameter of the left whose bare name is on the right is changed in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import attrs
import numpy as np

from ..dtypes import DType, Ints, Strs
from ._array import ArraySpec

__all__ = [
    "KINDS",
    "Item",
    "Shapes",
    "check_index",
    "column",
    "common_shape",
    "complex_of",
    "parse_shapes",
    "real_of",
]


_REAL = {DType.complex64: DType.float32, DType.complex128: DType.float64}
_COMPLEX = {real: number for number, real in _REAL.items()}


def real_of(dtype: DType) -> DType:
    """Find the dtype of absolute values."""
    return _REAL.get(dtype, dtype)


def complex_of(dtype: DType) -> DType:
    """Return the complex dtype for the roots of polynomials."""
    return _COMPLEX.get(dtype, dtype)


def _constant(dtype: DType) -> Callable[[DType], DType]:
    return lambda _: dtype


KINDS: Mapping[str, Callable[[DType], DType]] = {
    "real": real_of,
    "complex": complex_of,
    **{dtype.value: _constant(dtype) for dtype in DType},
}
"""How the dtype of an array follows from that of the others."""

_INDEX = {DType.int32, DType.int64}

_ITEM = re.compile(
    r"\s*(?P<name>[\w.]+)(\^(?P<op>\w+))?(\s*:\s*(?P<kind>\w+))?\s*(\((?P<dims>([^()]|\([^()]*\))*)\))?\s*(,|$)"
)
_DIM = re.compile(
    r"(?P<letter>[a-z](\+1)?)(?P<mark>\?|>0)?|(?P<number>\d+)|min\((?P<p>[a-z]), ?(?P<q>[a-z])\)"
)


@attrs.frozen
class Item:
    """One array in a line of shapes.

    Attributes:
        name: Its name.
        dims: Its last extents: letters, ``"m+1"``, numbers, or pairs of letters, with the lesser one used.
        stack: Axes before them: ``"..."``, ``"s..."``, ``"*"``, or nothing.
        op: The parameter with the BLAS's letter, or nothing.
        kind: Key of `KINDS`, ``"index"``, or nothing.
        optional: The number of `dims` that are absent if there are too few axes.
        positive: Letters that are not 0.
        is_bare: Whether it is a bare name.
    """

    name: str
    dims: tuple[str | int | tuple[str, str], ...] = ()
    stack: str = ""
    op: str = ""
    kind: str = ""
    optional: int = 0
    positive: frozenset[str] = frozenset()
    is_bare: bool = False

    @property
    def field(self) -> str:
        """Its name in a specification."""
        return self.name.replace(".", "_")

    def dtype(self, dtype: DType) -> DType:
        """Return the dtype of the array, given the dtype of the other arrays."""
        return KINDS[self.kind](dtype) if self.kind else dtype

    def shown(self, extents: Mapping[str, int]) -> str:
        """Return the required shape, with the known extents filled in."""
        parts = [self.stack.removeprefix("s")] if self.stack else []
        parts += [str(extents.get(dim, dim)) if isinstance(dim, str) else str(dim) for dim in self.dims]
        shapes = [parts]
        if self.optional:
            # Without the optional dimensions there is also no stack.
            shapes.insert(0, parts[1 if self.stack else 0 : -self.optional])
        return " or ".join([f"({', '.join(shape)}{',' * (len(shape) == 1)})" for shape in shapes])


@attrs.frozen(eq=False)
class Shapes:
    """A line of shapes, taken apart.

    Attributes:
        line: The line.
        inputs: The arrays on the left.
        outputs: The arrays on the right, but for the bare ones.
        updated: Names of the bare ones.
    """

    line: str
    inputs: tuple[Item, ...]
    outputs: tuple[Item, ...]
    updated: Strs

    def fit(
        self, name: str, shapes: tuple[Ints | None, ...], letters: tuple[object, ...] = ()
    ) -> tuple[tuple[Ints, ...], Ints, bool]:
        """Compare arrays with the line.

        Args:
            name: Name of the operation, for the errors.
            shapes: Shapes of the inputs; None for an omitted input.
            letters: The BLAS's letters of the inputs with an ``^op``, in their order.

        Returns:
            The shapes of the outputs; the stack of the first input; whether optional extents are absent.

        Raises:
            numpy.linalg.LinAlgError: An array is not a stack of matrices, or not of square ones.
            ValueError: The shapes do not fit for another reason.
        """
        match = _Match(name, self, shapes)
        ops = iter(letters)
        for item, shape in zip(self.inputs, shapes, strict=True):
            turned = bool(item.op) and next(ops) != "N"
            if shape is not None:
                match.take(item, shape, is_turned=turned)
        first, shape = self.inputs[0], shapes[0] or ()
        count = len(first.dims)
        outputs = tuple([match.output_shape(item) for item in self.outputs])
        return outputs, shape[: len(shape) - count], match.is_flat


class _Match:
    """Find the values of the letters, as far as the inputs determine them."""

    def __init__(self, name: str, shapes: Shapes, input_shapes: tuple[Ints | None, ...]) -> None:
        self._name = name
        self._shapes = shapes
        self._input_shapes = input_shapes
        self._extents: dict[str, int] = {}
        self._broadcast: Ints = ()
        self._same: dict[str, Ints] = {}
        self.is_flat = False

    def take(self, item: Item, shape: Ints, *, is_turned: bool) -> None:
        """Take an input."""
        if item.stack == "*":
            if self._same.setdefault("*", shape) != shape:
                self._refuse(item)
            return
        dims = item.dims
        if len(shape) < len(dims) and item.optional:
            self.is_flat, dims = True, dims[: -item.optional]
        split = len(shape) - len(dims)
        if split < 0 or (split and (not item.stack or len(dims) < len(item.dims))):
            self._refuse_axes(item, shape)
        core = shape[split:][::-1] if is_turned else shape[split:]
        if len(dims) == 2 and dims[0] == dims[1] and core[0] != core[1]:
            raise np.linalg.LinAlgError(
                f"{self._name}: last 2 dimensions of {item.name} must be square, got shape {shape}"
            )
        self._take_extents(item, dims, core)
        self._take_stack(item, shape[:split])

    def _take_extents(self, item: Item, dims: tuple[Any, ...], core: Ints) -> None:
        for dim, extent in zip(dims, core, strict=True):
            expected = dim if isinstance(dim, int) else self._extents.setdefault(str(dim), extent)
            self._extents.setdefault(f"{dim}+1", expected + 1)
            if expected != extent:
                self._refuse(item)
            if dim in item.positive and not extent:
                raise ValueError(f"{self._name}: {item.name} must not be empty")

    def _take_stack(self, item: Item, stack: Ints) -> None:
        if item.stack == "...":
            common = common_shape(self._broadcast, stack)
            if common is None:
                self._refuse(item, " with leading axes that broadcast")
            self._broadcast = common
        elif item.stack and self._same.setdefault(item.stack, stack) != stack:
            self._refuse(item, " with the same leading axes")

    def output_shape(self, item: Item) -> Ints:
        """Return the shape of an output."""
        stack = {"...": self._broadcast, "": ()}.get(item.stack)
        if stack is None:
            stack = self._same[item.stack]
        dims = item.dims[: -item.optional] if self.is_flat and item.optional else item.dims
        return (*stack, *[self._extent(dim) for dim in dims])

    def _extent(self, dim: str | int | tuple[str, str]) -> int:
        if isinstance(dim, int):
            return dim
        return self._extents[dim] if isinstance(dim, str) else min(self._extents[letter] for letter in dim)

    def _refuse_axes(self, item: Item, shape: Ints) -> NoReturn:
        if len(item.dims) == 2 and item.stack and not item.optional:
            raise np.linalg.LinAlgError(
                f"{self._name}: {item.name} must be at least two-dimensional, got shape {shape}"
            )
        count = {0: "no axes", 1: "one axis", 2: "two axes"}.get(len(item.dims), f"{len(item.dims)} axes")
        if item.optional or item.stack:
            self._refuse(item)
        raise ValueError(f"{self._name}: {item.name} must have {count}, got shape {shape}")

    def _refuse(self, item: Item, detail: str = "") -> NoReturn:
        actual = " and ".join(
            f"{operand.name} of shape {shape}"
            for operand, shape in zip(self._shapes.inputs, self._input_shapes, strict=True)
            # A reader knows the shape of a sparse matrix, but not the shapes of its arrays.
            if shape is not None and (operand is item or "." not in operand.name)
        )
        label = f"op({item.name})" if item.op else item.name
        if item.stack == "*":
            raise ValueError(f"{self._name}: arrays must share a shape, got {actual}")
        raise ValueError(
            f"{self._name}: {label} must have shape {item.shown(self._extents)}{detail}, got {actual}"
        )


def parse_shapes(line: str) -> Shapes:
    """Parse a line of shapes.

    Raises:
        ValueError: It lacks an arrow, an item cannot be read, or no array determines a letter on the right.
    """
    lhs, arrow, rhs = line.partition("->")
    if not arrow:
        raise ValueError(f"shapes {line!r} have no '->'")
    inputs, outputs = _items(lhs), _items(rhs)
    letters = _sources(line, inputs)
    for item in outputs:
        for letter in _letters(item):
            if letter not in letters:
                raise ValueError(
                    f"shapes {line!r}: letter {letter!r} of {item.name} does not occur on the left"
                )
        if item.stack and item.stack not in {operand.stack for operand in inputs}:
            raise ValueError(f"shapes {line!r}: {item.stack!r} of {item.name} does not occur on the left")
    names = {item.name for item in inputs}
    updated = tuple(item.name for item in outputs if item.is_bare)
    for name in updated:
        if name not in names:
            raise ValueError(f"shapes {line!r}: {name} is changed in place, and does not stand on the left")
    bare = [item.name for item in inputs if item.is_bare]
    if bare:
        raise ValueError(f"shapes {line!r}: the shape of {bare[0]} is missing")
    return Shapes(line, inputs, tuple(item for item in outputs if not item.is_bare), updated)


def _sources(line: str, inputs: Sequence[Item]) -> set[str]:
    """Return the extents that the inputs determine: letters, and one more than each letter."""
    extents = set[str]()
    for item in inputs:
        for dim in sorted(_letters(item)):
            if len(dim) == 1:
                extents.update((dim, f"{dim}+1"))
            elif dim not in extents:
                raise ValueError(f"shapes {line!r}: {dim!r} of {item.name} stands before {dim[0]!r}")
    return extents


def _letters(item: Item) -> list[str]:
    letters: list[str] = []
    for dim in item.dims:
        letters += [dim] if isinstance(dim, str) else [] if isinstance(dim, int) else list(dim)
    return letters


def _items(side: str) -> tuple[Item, ...]:
    items: list[Item] = []
    position = 0
    while position < len(side) and side[position:].strip():
        match = _ITEM.match(side, position)
        if match is None:
            raise ValueError(f"shapes {side.strip()!r}: {side[position:].strip()!r} cannot be read")
        items.append(_item(match))
        position = match.end()
    return tuple(items)


def _item(match: re.Match[str]) -> Item:
    kind = match["kind"] or ""
    if kind and kind not in (*KINDS, "index"):
        raise ValueError(f"shapes: {kind!r} of {match['name']} is not a dtype; there are {', '.join(KINDS)}")
    if match["dims"] is None:
        return Item(match["name"], kind=kind, op=match["op"] or "", is_bare=True)
    dims: list[str | int | tuple[str, str]] = []
    stack, optional, positive = "", 0, set[str]()
    for part in re.split(r",\s*(?![^()]*\))", match["dims"].strip()) if match["dims"].strip() else ():
        if part in ("...", "s...", "*") and not dims and not stack:
            stack = part
            continue
        dim = _DIM.fullmatch(part)
        if dim is None:
            raise ValueError(f"shapes: {part!r} of {match['name']} cannot be read")
        dims.append(dim["letter"] or ((dim["p"], dim["q"]) if dim["p"] else int(dim["number"])))
        optional += dim["mark"] == "?"
        if dim["mark"] == ">0":
            positive.add(dim["letter"])
    return Item(match["name"], tuple(dims), stack, match["op"] or "", kind, optional, frozenset(positive))


@lru_cache
def common_shape(*shapes: Ints) -> Ints | None:
    """Return the shape that all broadcast to; None where there is none."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        return None


def check_index(name: str, arrays: Sequence[tuple[str, ArraySpec]]) -> None:
    """Require that all arrays with ``: index`` have one dtype.

    Raises:
        TypeError: They differ, or are not of int32 or int64.
    """
    dtypes = [array.dtype for _, array in arrays]
    if len(set(dtypes)) > 1 or not set(dtypes) <= _INDEX:
        fields = " and ".join(field for field, _ in arrays)
        raise TypeError(f"{name}: {fields} must all be int32 or int64, got {' and '.join(map(str, dtypes))}")


def column(vectors: ArraySpec) -> ArraySpec:
    """Describe vectors as matrices of one column."""
    step = vectors.dtype.itemsize
    return attrs.evolve(vectors, shape=(*vectors.shape, 1), strides=(*vectors.strides, step))


def refuse_shapes(name: str, spec: object, rule: str, **arrays: ArraySpec) -> NoReturn:
    """Refuse a specification of an operation over the shapes of its arrays.

    Raises:
        ValueError: Always.
    """
    actual = ", ".join([f"{field} of shape {array.shape}" for field, array in arrays.items()])
    raise ValueError(f"{name}: {type(spec).__name__}: {rule}, got {actual}")


def check_one_dtype(name: str, spec: object, **arrays: ArraySpec) -> None:
    """Require one dtype of all arrays.

    Raises:
        TypeError: They differ.
    """
    if len({array.dtype for array in arrays.values()}) > 1:
        actual = ", ".join([f"{field} of {array.dtype}" for field, array in arrays.items()])
        raise TypeError(f"{name}: {type(spec).__name__}: the arrays must share a dtype, got {actual}")
