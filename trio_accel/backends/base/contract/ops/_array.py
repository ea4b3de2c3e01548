"""Arrays in device memory, and the roles of a specification's fields: how an operation uses each."""

from __future__ import annotations

import enum
import functools
import math
from typing import Any, Literal, TypeAlias, overload

import attrs
import numpy as np
import numpy.typing as npt

from ..dtypes import DType, Ints

__all__ = [
    "ArraySpec",
    "NumberRole",
    "Role",
    "StatusArray",
    "contiguous_strides",
    "exact",
    "number",
    "packed",
    "reads",
    "scalar",
    "status",
    "updates",
    "writes",
]

_MOST_LAYOUTS = 1024


@attrs.define(on_setattr=None, unsafe_hash=True)
class ArraySpec:
    """An array in device memory: its place and layout.

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
    shape: Ints
    strides: Ints

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
        """Whether the elements are in C order without gaps."""
        return self.size <= 1 or self.strides == contiguous_strides(self.shape, self.dtype.itemsize)


@functools.lru_cache(_MOST_LAYOUTS)
def contiguous_strides(shape: Ints, itemsize: int) -> Ints:
    """Compute the strides in bytes of a C-ordered array."""
    strides: list[int] = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(int(extent), 1)
    return tuple(reversed(strides))


Access: TypeAlias = Literal["read", "write", "update"]
"""Access of an operation to an array: a write overwrites it in full, an update reads and changes it."""

Count: TypeAlias = Literal["one", "optional", "many"]
"""How many arrays a field holds: one; one or None; a tuple of any number."""

StatusArray: TypeAlias = npt.NDArray[np.int32]
"""Status words of an operation, in host memory."""

_ROLE = "trio_accel.role"


class NumberRole(enum.Enum):
    """Relation of a number to an array of the same `OperationSpec`."""

    FACTOR = "factor"
    """Its elements are multiplied by it: they are of a floating or complex dtype."""
    ELEMENT = "element"
    """Its elements become this: it has to be a value of their dtype."""


@attrs.frozen
class Role:
    """The role of one field.

    Attributes:
        kind: ``"array"``, ``"exact"``, ``"scalar"``, ``"status"``; ``"other"`` for a field without a role.
        access: How the operation uses the array.
        count: The number of arrays.
        number: The declared relation of a scalar to an array.
        of: The name of the field with that array.
        is_packed: Whether a scalar is bytes that are sent to a worker next to a launch template.
    """

    kind: Literal["array", "exact", "scalar", "status", "other"]
    access: Access | None = None
    count: Count = "one"
    number: NumberRole | None = None
    of: str = ""
    is_packed: bool = False


_OTHER_ROLE = Role("other")


def role_of(field: attrs.Attribute[Any]) -> Role:
    """Return the role that a field of an attrs class was declared with."""
    role: Role = field.metadata.get(_ROLE, _OTHER_ROLE)
    return role


@overload
def reads() -> ArraySpec: ...
@overload
def reads(*, optional: Literal[True]) -> ArraySpec | None: ...
@overload
def reads(*, variadic: Literal[True]) -> tuple[ArraySpec, ...]: ...
def reads(*, optional: bool = False, variadic: bool = False) -> Any:
    """Declare a field of an `OperationSpec` as an array that is read only.

    Args:
        optional: The field may be None instead.
        variadic: The field is a tuple of arrays, of any length.
    """
    return _arrays("read", optional=optional, variadic=variadic)


@overload
def writes() -> ArraySpec: ...
@overload
def writes(*, optional: Literal[True]) -> ArraySpec | None: ...
@overload
def writes(*, variadic: Literal[True]) -> tuple[ArraySpec, ...]: ...
def writes(*, optional: bool = False, variadic: bool = False) -> Any:
    """Declare a field of an `OperationSpec` as an array to be overwritten in full; see `reads`."""
    return _arrays("write", optional=optional, variadic=variadic)


@overload
def updates() -> ArraySpec: ...
@overload
def updates(*, optional: Literal[True]) -> ArraySpec | None: ...
@overload
def updates(*, variadic: Literal[True]) -> tuple[ArraySpec, ...]: ...
def updates(*, optional: bool = False, variadic: bool = False) -> Any:
    """Declare a field of an `OperationSpec` as an array to be read and changed in place; see `reads`."""
    return _arrays("update", optional=optional, variadic=variadic)


def exact() -> Any:
    """Declare a field of an `OperationSpec` as an integer, a name, or a tuple of these.

    Equal values mean the same operation, so that its plan is used again.
    """
    return _field(Role("exact"))


def scalar() -> Any:
    """Declare a field of an `OperationSpec` as a number that the library gets with each launch."""
    return _field(Role("scalar"))


def packed() -> bytes:
    """Declare a field of an `OperationSpec` as numbers packed into bytes, handed over with each launch.

    Launches that differ only in these numbers and in their blocks share a launch template.
    """
    field: bytes = _field(Role("scalar", is_packed=True))
    return field


def number(role: NumberRole, of: str) -> Any:
    """Declare a `scalar` field of an `OperationSpec` that is checked before the launch.

    Args:
        role: Relation of the number to that array.
        of: Name of the array field.
    """
    return _field(Role("scalar", number=role, of=of))


def status(*, optional: bool = False) -> Any:
    """Declare a field of an `OperationSpec` as status words: a host array that the operation fills.

    The planner makes it by `Planner.status`. The backend has filled it when the operation is complete;
    then `OperationSpec.check_status` reads it, and the reply may be made from it.

    Args:
        optional: Whether it may be None.
    """
    role = Role("status", count="optional" if optional else "one")
    return attrs.field(metadata={_ROLE: role}, eq=False)


def _arrays(access: Access, *, optional: bool, variadic: bool) -> Any:
    if optional and variadic:
        raise TypeError("a field is an optional array or many arrays: an empty tuple is many of none")
    return _field(Role("array", access, "optional" if optional else "many" if variadic else "one"))


def _field(role: Role) -> Any:
    return attrs.field(metadata={_ROLE: role})
