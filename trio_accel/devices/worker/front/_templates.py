"""Operations that differ from earlier ones in their blocks alone: the rest is sent only once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias
from weakref import ref

import attrs
import numpy.typing as npt

from ....backends.base.host import address_of
from ....backends.base.ops import ArraySpec, CopyFromHostSpec, CopyToHostSpec, OperationSpec, map_arrays
from ...operations._operation import Launch
from ..transport._codec import Message
from ..transport._wire import Wire, encode_spec, spec_key

__all__ = ["TemplateTable"]

# Then all are forgotten: a program whose shapes are always others gains nothing by them.
_MOST = 1024

_ID, _ARGUMENT, _BLOCK = attrgetter("id"), itemgetter(0), itemgetter(1)

_Key: TypeAlias = tuple[Any, ...]
_Found: TypeAlias = tuple[int, tuple[int, ...]]
_Rest: TypeAlias = tuple[object, ...]
_AddressOf: TypeAlias = Callable[[npt.NDArray[Any]], "Wire | None"]


@attrs.frozen
class _Copy:
    """What was found for a copy from or to a host array.

    Attributes:
        array: The host array; nothing here keeps its memory.
        at: The array of the device, which is kept, so that there is no other with its identity.
        address: Where the host array begins.
        rest: The rest of the launch.
        found: Its template and blocks.
    """

    array: ref[npt.NDArray[Any]]
    at: ArraySpec
    address: int
    rest: _Rest
    found: _Found


def _nowhere(host: npt.NDArray[Any]) -> None:
    """No host array lies where a worker has it, too."""


class TemplateTable:
    """The launch templates that one worker has.

    Two launches have one template if they are the same once their blocks are numbered in the order in which
    they occur. The second of them makes it, as many occur only once.

    Args:
        post: Sends a message to the worker.
    """

    __slots__ = ("_copies", "_last", "_numbers", "_post", "_specs")

    def __init__(self, post: Callable[[Message], None]) -> None:
        self._post = post
        # 0 stands for one that was seen once.
        self._numbers: dict[_Key, int] = {}
        # Launch cache, by the identity of a specification, which is kept here: the rest of its launch, and
        # what was found.
        self._specs: dict[int, tuple[OperationSpec, _Rest, _Found]] = {}
        # The same for copies, by their arrays' identities, as their specifications are others each time.
        self._copies: dict[tuple[int, int, type[OperationSpec]], _Copy] = {}
        self._last = 0

    def find(self, launch: Launch, host: _AddressOf = _nowhere) -> tuple[int, tuple[int, ...]] | None:
        """Find the template of a launch; a new one is posted, ahead of what is posted next.

        Args:
            launch: The launch. Host arrays are part of the template, by their addresses.
            host: Tells the address of one; None where the worker does not have it.

        Returns:
            Number of the template, and the blocks in the order in which they occur. None where the launch has
            no template, or is the first of its kind: then it is sent whole.

        Raises:
            TypeError: No other process can import the specification's class.
        """
        if launch.staged or launch.fault is not None:
            return None
        spec = launch.spec
        cached = self._specs.get(id(spec))
        if cached is not None and cached[0] is spec and cached[1] == _rest_of(launch):
            return cached[2]
        if type(spec) is CopyFromHostSpec:
            return self._find_copy(launch, spec.host, spec.out, host)
        if type(spec) is CopyToHostSpec:
            return self._find_copy(launch, spec.host, spec.source, host)
        found = self._find(launch, host)
        if found is not None and spec.descriptor().identity is not None:
            if len(self._specs) >= _MOST:
                self._specs.clear()
            self._specs[id(spec)] = spec, _rest_of(launch), found
        return found

    def _find_copy(
        self, launch: Launch, array: npt.NDArray[Any], at: ArraySpec, host: _AddressOf
    ) -> _Found | None:
        """Find the template of a copy between a host array and one of the device."""
        key = id(array), id(at), type(launch.spec)
        cached = self._copies.get(key)
        if (
            cached is not None
            and cached.array() is array
            and cached.at is at
            # It has the shape and the dtype of the other, but NumPy lets it be changed otherwise.
            and array.flags.c_contiguous
            and cached.address == address_of(array)
            and cached.rest == _rest_of(launch)
        ):
            return cached.found
        found = self._find(launch, host)
        if found is not None:
            if len(self._copies) >= _MOST:
                self._copies.clear()
            self._copies[key] = _Copy(ref(array), at, address_of(array), _rest_of(launch), found)
        return found

    def _find(self, launch: Launch, host: _AddressOf) -> _Found | None:
        found = spec_key(launch.spec, host)
        if found is None:
            return None
        key, blocks = found
        key += launch.name, launch.library
        for block, nbytes in launch.allocations:
            key.append(nbytes)
            blocks.append(block)
        # Where one kind of block ends and the next begins.
        key.append("outputs")
        for output in launch.outputs:
            blocks.append(output.id)
        key.append(len(blocks))
        for argument, used in launch.uses:
            key.append(argument)
            blocks.append(used.id)
        positions: dict[int, int] = {}
        position_of = positions.setdefault
        key += [position_of(block, len(positions)) for block in blocks]
        whole = tuple(key)
        numbers = self._numbers
        number = numbers.get(whole)
        if number is None:
            if len(numbers) >= _MOST:
                numbers.clear()
                self._specs.clear()
                self._copies.clear()
                self._post(("forget_templates",))
            numbers[whole] = 0
            return None
        if not number:
            plain = _encode(launch, positions, host)
            self._last += 1
            number = numbers[whole] = self._last
            self._post(("template", number, plain))
        return number, tuple(positions)


def _rest_of(launch: Launch) -> _Rest:
    """All of a launch of which nothing is staged, but its specification."""
    return (
        launch.name,
        launch.library,
        launch.allocations,
        tuple(map(_ID, launch.outputs)),
        tuple(map(_ARGUMENT, launch.uses)),
        tuple(map(_ID, map(_BLOCK, launch.uses))),
    )


def _encode(launch: Launch, positions: Mapping[int, int], host: _AddressOf) -> Message:
    """Make plain values of a launch, with the positions of its blocks in place of their ids."""
    described = launch.spec.descriptor()

    def numbered(array: ArraySpec) -> ArraySpec:
        return ArraySpec(positions[array.block], array.offset, array.dtype, array.shape, array.strides)

    spec = described.make([map_arrays(value, numbered) for value in described.values(launch.spec)])
    return (
        launch.name,
        launch.library,
        encode_spec(spec, host),
        tuple([(positions[block], nbytes) for block, nbytes in launch.allocations]),
        tuple([positions[output.id] for output in launch.outputs]),
        tuple([(argument, positions[used.id]) for argument, used in launch.uses]),
    )
