"""What an operation specification is made of."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import attrs

from ..dtypes import DType

__all__ = [
    "ArraySpec",
    "NumberRole",
    "OperationSpec",
    "array_fields",
    "contiguous_strides",
    "exact",
    "number",
    "number_fields",
    "reads",
    "updates",
    "writes",
]

_ROLE = "trio_accel.role"
_NUMBER = "trio_accel.number"
_EXACT = "exact"
_MOST_LAYOUTS = 1024


@attrs.define(on_setattr=None, unsafe_hash=True)
class ArraySpec:
    """An array in device memory: where it lies and how it is laid out.

    Not to be changed once it is made, which is not enforced: that would take longer than to make it.

    Attributes:
        block: Id of the memory block.
        offset: Bytes from the start of the block to the first element.
        dtype: Element type.
        shape: Elements along each axis.
        strides: Bytes from one element to the next along each axis.
    """

    block: int
    offset: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        return self.size <= 1 or self.strides == contiguous_strides(self.shape, self.dtype.itemsize)


@functools.lru_cache(_MOST_LAYOUTS)
def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a C-ordered array."""
    strides: list[int] = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(int(extent), 1)
    return tuple(reversed(strides))


def reads() -> ArraySpec:
    """Declare a field of an `OperationSpec` as an array that is only read."""
    field: ArraySpec = attrs.field(metadata={_ROLE: "read"})
    return field


def writes() -> ArraySpec:
    """Declare a field of an `OperationSpec` as an array that is overwritten in full."""
    field: ArraySpec = attrs.field(metadata={_ROLE: "write"})
    return field


def updates() -> ArraySpec:
    """Declare a field of an `OperationSpec` as an array that is read and changed in place."""
    field: ArraySpec = attrs.field(metadata={_ROLE: "update"})
    return field


def exact() -> Any:
    """Declare a field of an `OperationSpec` as a whole number, a name, or a tuple of these.

    Of these, unlike the zeros of floating types, equal ones are the same.
    """
    return attrs.field(metadata={_ROLE: _EXACT})


class NumberRole(enum.Enum):
    """What a number of an `OperationSpec` is to an array of it."""

    FACTOR = "factor"
    """Its elements are multiplied by it: they are of a floating or complex dtype."""
    ELEMENT = "element"
    """Its elements become this: it has to be a value of their dtype."""


def number(role: NumberRole, of: str) -> Any:
    """Declare a field of an `OperationSpec` as a number, which is checked before it is launched.

    Args:
        role: What the number is to that array.
        of: Name of the array field.
    """
    return attrs.field(metadata={_NUMBER: (role, of)})


class OperationSpec:
    """Base of operation specifications: attrs classes of codes, sizes and `ArraySpec` fields.

    Nothing of one is changed once it is made. Those here are not frozen: for each operation one is made, and
    to have that enforced would take twice as long as to make it.

    A specification holds no actor and no reference, so it means the same in another process.
    Its array fields are declared by `reads`, `writes` and `updates`; hazards follow from that. Numbers that
    the arrays have to be able to hold are declared by `number`. If all other fields are declared by `exact`,
    a repeated operation on the same arrays takes less time.
    """

    __slots__ = ()

    def inputs(self) -> tuple[ArraySpec, ...]:
        """Arrays that the operation reads (updated ones too)."""
        return _getters(type(self))[0](self)  # type: ignore[arg-type]  # mypy takes no class for hashable

    def outputs(self) -> tuple[ArraySpec, ...]:
        """Arrays that the operation changes (updated ones too)."""
        return _getters(type(self))[1](self)  # type: ignore[arg-type]  # the same

    def blocks(self) -> tuple[frozenset[int], frozenset[int]]:
        """Blocks that the operation reads, and blocks that it changes (updated ones are both)."""
        return _block_finder(type(self))(self)  # type: ignore[arg-type]  # the same

    def check_shapes(self, name: str) -> None:
        """Refuse arrays whose shapes or dtypes do not fit each other, before anything is launched.

        Here nothing is refused. A class whose arrays can disagree overrides it.

        Args:
            name: Name of the operation, for the message.

        Raises:
            ValueError: Shapes that do not fit.
            TypeError: Dtypes that do not fit.
        """

    def identity(self) -> tuple[object, ...] | None:
        """What tells it from others as long as its arrays are held: which `ArraySpec` each is, and the rest.

        None where a field is not declared.
        """
        find = _identity_finder(type(self))  # type: ignore[arg-type]  # the same
        return None if find is None else find(self)


_Getter = Callable[[OperationSpec], tuple[ArraySpec, ...]]
_BlockFinder = Callable[[OperationSpec], tuple[frozenset[int], frozenset[int]]]
_IdentityFinder = Callable[[OperationSpec], tuple[object, ...]]


@functools.cache
def _getters(cls: type[OperationSpec]) -> tuple[_Getter, _Getter]:
    """What gets the arrays that a specification reads, and those that it changes."""
    return _getter(cls, "read", "update"), _getter(cls, "write", "update")


@functools.cache
def _block_finder(cls: type[OperationSpec]) -> _BlockFinder:
    """What finds the blocks of these; written out for each class, as looking names up takes twice as long."""
    reads, writes = (
        "".join([f"spec.{name}.block, " for name in _names(cls, role, "update")])
        for role in ("read", "write")
    )
    finder: _BlockFinder = eval(f"lambda spec: (frozenset(({reads})), frozenset(({writes})))")  # noqa: S307  # of names of attributes
    return finder


@functools.cache
def _identity_finder(cls: type[OperationSpec]) -> _IdentityFinder | None:
    fields = attrs.fields(cls)  # type: ignore[arg-type]  # every subclass is an attrs class
    if any(_ROLE not in field.metadata for field in fields):
        return None
    values = "".join(
        [
            f"spec.{field.name}, " if field.metadata[_ROLE] == _EXACT else f"id(spec.{field.name}), "
            for field in fields
        ]
    )
    finder: _IdentityFinder = eval(f"lambda spec: (cls, {values})", {"cls": cls})  # noqa: S307  # of names of attributes
    return finder


def array_fields(cls: type[OperationSpec]) -> tuple[str, ...]:
    """Names of the fields that are arrays."""
    return tuple(_names(cls, "read", "write", "update"))


def number_fields(cls: type[OperationSpec]) -> Mapping[str, tuple[NumberRole, str]]:
    """What was declared by `number`: by the name of the field, the role and the array."""
    fields = attrs.fields(cls)  # type: ignore[arg-type]  # every subclass is an attrs class
    return {field.name: field.metadata[_NUMBER] for field in fields if _NUMBER in field.metadata}


def _names(cls: type[OperationSpec], *roles: str) -> list[str]:
    """Names of the array fields with one of these roles."""
    fields = attrs.fields(cls)  # type: ignore[arg-type]  # every subclass is an attrs class
    return [field.name for field in fields if field.metadata.get(_ROLE) in roles]


def _getter(cls: type[OperationSpec], *roles: str) -> _Getter:
    """What gets the array fields with one of these roles."""
    names = _names(cls, *roles)
    if len(names) > 1:
        return attrgetter(*names)
    if not names:
        return lambda spec: ()
    # Of one name, it makes no tuple.
    get: Callable[[OperationSpec], ArraySpec] = attrgetter(names[0])
    return lambda spec: (get(spec),)
