"""Arrays in device memory, and roles of the fields of a specification: what an operation does with each."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeAlias, overload

import attrs
import numpy as np
import numpy.typing as npt

from ..dtypes import DType

__all__ = [
    "ArraySpec", "NumberRole", "PeerArray", "Peers", "Role", "StatusArray", "contiguous_strides", "exact",
    "number", "packed", "peers", "reads", "scalar", "status", "updates", "writes",
]  # fmt: skip

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
        """Whether the elements are in C order without gaps."""
        return self.size <= 1 or self.strides == contiguous_strides(self.shape, self.dtype.itemsize)


@functools.lru_cache(_MOST_LAYOUTS)
def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Compute the strides in bytes of a C-ordered array."""
    strides: list[int] = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(int(extent), 1)
    return tuple(reversed(strides))


@attrs.frozen(eq=False)
class PeerArray:
    """An array that one part of an operation lends to the kernels of the others.

    Attributes:
        array: Its place and layout in the memory of its device.
        part: Number of the part that has it.
        owner: Its open device, as the backend knows it; None where the kernel's own device has borrowed
            the array, and has it at that place.
    """

    array: ArraySpec
    part: int
    owner: object


class Peers:
    """The other parts, as a kernel of one part sees them: arrays that they lend, and whether one has failed.

    While the kernel runs, the stream of every part has come to its kernel, and none goes on behind it.

    Attributes:
        arrays: The arrays that the part was given.
        failure: The error of another part, if one has failed.
    """

    __slots__ = ("_callbacks", "arrays", "failure")

    def __init__(self, arrays: tuple[PeerArray, ...]) -> None:
        self.arrays: tuple[PeerArray, ...] = arrays
        self.failure: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Have something called on the Trio thread when another part fails; at once if one has.

        A kernel that waits for its peers stops waiting by this. The callback must be quick and not raise.
        """
        self._callbacks.append(callback)
        # A kernel may say so in a thread while the other part fails: looked at behind, none is overlooked.
        if self.failure is not None:
            self._call_back()

    def fail(self, failure: BaseException) -> None:
        """Note that another part has failed; called by the engine."""
        if self.failure is None:
            self.failure = failure
            self._call_back()

    def end(self) -> None:
        """End with the operation; called by the engine."""
        self._callbacks.clear()

    def _call_back(self) -> None:
        while self._callbacks:
            # The other thread may take the last one: each is called once.
            with suppress(IndexError):
                self._callbacks.pop()()


Access: TypeAlias = Literal["read", "write", "update"]
"""Access of an operation to an array: a write overwrites it in full, an update reads and changes it."""

Count: TypeAlias = Literal["one", "optional", "many"]
"""How many arrays a field holds: one; one or None; a tuple of any number."""

StatusArray: TypeAlias = npt.NDArray[np.int32]
"""Status words of an operation, in host memory."""

_ROLE = "trio_accel.role"


class NumberRole(enum.Enum):
    """Relation of a number of an `OperationSpec` to an array of it."""

    FACTOR = "factor"
    """Its elements are multiplied by it: they are of a floating or complex dtype."""
    ELEMENT = "element"
    """Its elements become this: it has to be a value of their dtype."""


@attrs.frozen
class Role:
    """The role of one field.

    Attributes:
        kind: ``"array"``, ``"exact"``, ``"scalar"``, ``"status"``, ``"peers"``; ``"other"`` for a field
            without a role.
        access: Of arrays: what is done with them.
        count: Of arrays: how many there are.
        number: Of a scalar: its relation to an array, where that was declared.
        of: Of such a scalar: the name of that field.
        is_packed: Of a scalar: whether it is bytes that cross to a worker beside a launch template.
    """

    kind: Literal["array", "exact", "scalar", "status", "peers", "other"]
    access: Access | None = None
    count: Count = "one"
    number: NumberRole | None = None
    of: str = ""
    is_packed: bool = False


_OTHER = Role("other")


def role_of(field: attrs.Attribute[Any]) -> Role:
    """Return the role that a field of an attrs class was declared with."""
    role: Role = field.metadata.get(_ROLE, _OTHER)
    return role


@overload
def reads() -> ArraySpec: ...
@overload
def reads(*, optional: Literal[True]) -> ArraySpec | None: ...
@overload
def reads(*, many: Literal[True]) -> tuple[ArraySpec, ...]: ...
def reads(*, optional: bool = False, many: bool = False) -> Any:
    """Declare a field of an `OperationSpec` as an array that is only read.

    Args:
        optional: The field may be None instead.
        many: The field is a tuple of arrays, of any length.
    """
    return _arrays("read", optional=optional, many=many)


@overload
def writes() -> ArraySpec: ...
@overload
def writes(*, optional: Literal[True]) -> ArraySpec | None: ...
@overload
def writes(*, many: Literal[True]) -> tuple[ArraySpec, ...]: ...
def writes(*, optional: bool = False, many: bool = False) -> Any:
    """Declare a field of an `OperationSpec` as an array that is overwritten in full; see `reads`."""
    return _arrays("write", optional=optional, many=many)


@overload
def updates() -> ArraySpec: ...
@overload
def updates(*, optional: Literal[True]) -> ArraySpec | None: ...
@overload
def updates(*, many: Literal[True]) -> tuple[ArraySpec, ...]: ...
def updates(*, optional: bool = False, many: bool = False) -> Any:
    """Declare a field of an `OperationSpec` as an array that is read and changed in place; see `reads`."""
    return _arrays("update", optional=optional, many=many)


def exact() -> Any:
    """Declare a field of an `OperationSpec` as a whole number, a name, or a tuple of these.

    Equal values mean the same operation, so that its plan is used again.
    """
    return _field(Role("exact"))


def scalar() -> Any:
    """Declare a field of an `OperationSpec` as a number that is handed to the library with each launch."""
    return _field(Role("scalar"))


def packed() -> bytes:
    """Declare a field of an `OperationSpec` as numbers packed into bytes, handed over with each launch.

    Launches that differ in them and in their blocks alone have one launch template.
    """
    field: bytes = _field(Role("scalar", is_packed=True))
    return field


def number(role: NumberRole, of: str) -> Any:
    """Declare a `scalar` field of an `OperationSpec` that is checked before it is launched.

    Args:
        role: Relation of the number to that array.
        of: Name of the array field.
    """
    return _field(Role("scalar", number=role, of=of))


def status() -> StatusArray:
    """Declare a field of an `OperationSpec` as status words: a host array that the operation fills.

    The planner makes it by `Planner.status`. The backend has filled it when the operation is complete;
    then `OperationSpec.check_status` reads it, and the reply may be made from it.
    """
    field: StatusArray = attrs.field(metadata={_ROLE: Role("status")}, eq=False)
    return field


def peers() -> Peers:
    """Declare a field of an `OperationSpec` as arrays of other devices, lent by the other parts.

    Only a part of an operation that spans devices has such a field, and one at most; its planner makes the
    value by `PartPlanner.peers`. The kernel gets the arrays by ``call.peers(...)``.
    """
    field: Peers = attrs.field(metadata={_ROLE: Role("peers")}, eq=False)
    return field


def _arrays(access: Access, *, optional: bool, many: bool) -> Any:
    if optional and many:
        raise TypeError("a field is an optional array or many arrays: an empty tuple is many of none")
    return _field(Role("array", access, "optional" if optional else "many" if many else "one"))


def _field(role: Role) -> Any:
    return attrs.field(metadata={_ROLE: role})
