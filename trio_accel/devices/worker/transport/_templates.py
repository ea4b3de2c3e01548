"""Operations that differ from earlier ones in their blocks alone: the rest is sent, and read, only once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias
from weakref import ref

import attrs
import numpy.typing as npt

from ....backends.base.host import address_of
from ....backends.base.ops import ArraySpec, CopyFromHostSpec, CopyToHostSpec, OperationSpec
from ...arrays._blocks import Block
from ...base._arrival import Arrival
from ...operations._operation import Launch
from ..back._blocks import WorkerBlocks
from ._channel import Message
from ._wire import Wire, decode_spec, encode_spec, no_host, spec_fields, spec_key

__all__ = ["Form", "FormTable"]

# Then all are forgotten: a program whose shapes are always others gains nothing by them.
_MOST = 1024
# Of one form: a program that drops its results has the same blocks again and again.
_MOST_MADE = 256

_ID, _ARGUMENT, _BLOCK = attrgetter("id"), itemgetter(0), itemgetter(1)

_Key: TypeAlias = tuple[Any, ...]
_Found: TypeAlias = tuple[int, tuple[int, ...]]
_Rest: TypeAlias = tuple[object, ...]
_Place: TypeAlias = Callable[[npt.NDArray[Any]], "Wire | None"]


@attrs.frozen
class _HostPlace:
    """Where a host array lies that a form has."""

    plain: Any


@attrs.frozen
class _Copy:
    """What was found of a copy from or to a host array.

    Attributes:
        array: The host array; nothing here keeps its memory.
        at: The array of the device, which is kept, so that there is no other with its identity.
        address: Where the host array begins.
        rest: The rest of the launch.
        found: Its form and blocks.
    """

    array: ref[npt.NDArray[Any]]
    at: ArraySpec
    address: int
    rest: _Rest
    found: _Found


def _nowhere(host: npt.NDArray[Any]) -> None:
    """No host array lies where a worker has it, too."""


class FormTable:
    """The forms that one worker knows; on the application's side.

    Two launches are of one form if they are the same once their blocks are numbered in the order in which
    they occur. The second of them makes it, as many occur only once.

    Args:
        post: Sends a message to the worker.
    """

    __slots__ = ("_copies", "_known", "_last", "_numbers", "_post")

    def __init__(self, post: Callable[[Message], None]) -> None:
        self._post = post
        # 0 stands for one that was seen once.
        self._numbers: dict[_Key, int] = {}
        # By the identity of a specification, which is kept here: the rest of its launch, and what was found.
        self._known: dict[int, tuple[OperationSpec, _Rest, _Found]] = {}
        # Of copies, by their arrays' identities, as their specifications are others each time.
        self._copies: dict[tuple[int, int, type[OperationSpec]], _Copy] = {}
        self._last = 0

    def find(self, launch: Launch, host: _Place = _nowhere) -> tuple[int, tuple[int, ...]] | None:
        """Find the form of a launch; a new one is posted, ahead of what is posted next.

        Args:
            launch: The launch. Host arrays are part of the form, by the place where they lie.
            host: Tells that place of one; None where the worker does not have it.

        Returns:
            Number of the form, and the blocks in the order of their places. None where it has no form,
            or is the first of it: then it travels as it is.

        Raises:
            TypeError: No other process can import the specification's class.
        """
        if launch.staged or launch.fault is not None:
            return None
        spec = launch.spec
        known = self._known.get(id(spec))
        if known is not None and known[0] is spec and known[1] == _rest_of(launch):
            return known[2]
        if type(spec) is CopyFromHostSpec:
            return self._find_copy(launch, spec.host, spec.out, host)
        if type(spec) is CopyToHostSpec:
            return self._find_copy(launch, spec.host, spec.source, host)
        found = self._find(launch, host)
        if found is not None and spec.identity() is not None:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[id(spec)] = spec, _rest_of(launch), found
        return found

    def _find_copy(
        self, launch: Launch, array: npt.NDArray[Any], at: ArraySpec, host: _Place
    ) -> _Found | None:
        """Find the form of a copy between a host array and one of the device."""
        key = id(array), id(at), type(launch.spec)
        known = self._copies.get(key)
        if (
            known is not None
            and known.array() is array
            and known.at is at
            # It has the shape and the dtype of the other, but NumPy lets it be changed otherwise.
            and array.flags.c_contiguous
            and known.address == address_of(array)
            and known.rest == _rest_of(launch)
        ):
            return known.found
        found = self._find(launch, host)
        if found is not None:
            if len(self._copies) >= _MOST:
                self._copies.clear()
            self._copies[key] = _Copy(ref(array), at, address_of(array), _rest_of(launch), found)
        return found

    def _find(self, launch: Launch, host: _Place) -> _Found | None:
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
        places: dict[int, int] = {}
        place_of = places.setdefault
        key += [place_of(block, len(places)) for block in blocks]
        whole = tuple(key)
        numbers = self._numbers
        number = numbers.get(whole)
        if number is None:
            if len(numbers) >= _MOST:
                numbers.clear()
                self._known.clear()
                self._copies.clear()
                self._post(("forget_forms",))
            numbers[whole] = 0
            return None
        if not number:
            plain = _encode(launch, places, host)
            self._last += 1
            number = numbers[whole] = self._last
            self._post(("form", number, plain))
        return number, tuple(places)


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


def _encode(launch: Launch, places: Mapping[int, int], host: _Place) -> Message:
    """Make plain values of a launch, with the places of its blocks instead of them."""
    fields = [
        ArraySpec(places[field.block], field.offset, field.dtype, field.shape, field.strides)
        if isinstance(field, ArraySpec)
        else field
        for field in spec_fields(launch.spec)
    ]
    return (
        launch.name,
        launch.library,
        encode_spec(type(launch.spec)(*fields), host),
        tuple([(places[block], nbytes) for block, nbytes in launch.allocations]),
        tuple([places[output.id] for output in launch.outputs]),
        tuple([(argument, places[used.id]) for argument, used in launch.uses]),
    )


@attrs.define(eq=False, on_setattr=None)
class Made:
    """What launches of a form have in common that are on the same blocks.

    Attributes:
        spec: What the backend runs; None where host arrays belong to it, of which one was not there yet.
        reads: Blocks that it reads.
        writes: Blocks that it changes.
        allocations: Id and bytes of the blocks to make first.
        outputs: Blocks that it writes.
        uses: Arguments that exist already, and their blocks.
        written: The `outputs`, as they were found last.
        used: The `uses`, likewise.
    """

    spec: OperationSpec | None
    reads: frozenset[int]
    writes: frozenset[int]
    allocations: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]
    uses: tuple[tuple[str, int], ...]
    written: tuple[Block, ...] = attrs.field(default=(), init=False)
    used: tuple[tuple[str, Block], ...] = attrs.field(default=(), init=False)
    _new: tuple[Block, ...] = attrs.field(default=(), init=False)
    # What the table's `changes` was then.
    _changes: int = attrs.field(default=-1, init=False)

    def is_found(self, table: WorkerBlocks) -> bool:
        """Whether all blocks are the ones that were found last, and none of those to be made is damaged."""
        is_found = self._changes == table.changes
        for block in self._new:
            is_found = is_found and block.damaged_by is None
        return is_found

    def find(self, table: WorkerBlocks) -> None:
        """Find the blocks."""
        self.written = tuple([table[block] for block in self.outputs])
        self.used = tuple([(argument, table[block]) for argument, block in self.uses])
        self._new = tuple([table[block] for block, _ in self.allocations])
        self._changes = table.changes


class Form:
    """Makes launches of one form; on the worker's side.

    Args:
        data: What a `FormTable` has sent.

    Raises:
        ImportError: This process does not have the specification's module.
    """

    __slots__ = (
        "_allocations",
        "_arrays",
        "_cls",
        "_fields",
        "_hosts",
        "_library",
        "_made",
        "_name",
        "_outputs",
        "_reads",
        "_uses",
        "_writes",
    )

    def __init__(self, data: Any) -> None:
        self._allocations: tuple[tuple[int, int], ...]
        self._outputs: tuple[int, ...]
        self._uses: tuple[tuple[str, int], ...]
        self._name, self._library, plain, self._allocations, self._outputs, self._uses = data
        place: Any = _HostPlace
        spec = decode_spec(plain, place)
        self._cls: Callable[..., OperationSpec] = type(spec)
        self._reads, self._writes = spec.blocks()
        self._fields = spec_fields(spec)
        self._arrays = [
            (index, field.block, (field.offset, field.dtype, field.shape, field.strides))
            for index, field in enumerate(self._fields)
            if isinstance(field, ArraySpec)
        ]
        self._hosts = [
            (index, field.plain[1:])
            for index, field in enumerate(self._fields)
            if isinstance(field, _HostPlace)
        ]
        self._made: dict[tuple[int, ...], Made] = {}

    def on(self, blocks: tuple[int, ...]) -> Made:
        """What follows from the blocks of a launch, in the order of their places."""
        made = self._made.get(blocks)
        if made is None:
            if len(self._made) >= _MOST_MADE:
                self._made.clear()
            made = self._made[blocks] = self._make(blocks)
        return made

    def forget_hosts(self) -> None:
        """Keep nothing that was made with host arrays."""
        if self._hosts:
            self._made.clear()

    def _make(self, blocks: tuple[int, ...]) -> Made:
        return Made(
            None if self._hosts else self._cls(*self._fields_on(blocks)),
            frozenset([blocks[place] for place in self._reads]),
            frozenset([blocks[place] for place in self._writes]),
            tuple([(blocks[place], nbytes) for place, nbytes in self._allocations]),
            tuple([blocks[place] for place in self._outputs]),
            tuple([(argument, blocks[place]) for argument, place in self._uses]),
        )

    def launch(
        self,
        number: int,
        blocks: tuple[int, ...],
        made: Made,
        shared: Callable[..., npt.NDArray[Any]] = no_host,
    ) -> Launch:
        """Make a launch of this form.

        Args:
            number: Number of the request.
            blocks: Its blocks, in the order of their places.
            made: What follows from them; its blocks are found.
            shared: Makes an array over memory of the application's; see `decode_launch`.
        """
        arrivals: list[Arrival] = []
        spec = made.spec
        if spec is None:
            spec = self._with_hosts(blocks, arrivals, shared)
            if not arrivals:
                # Nothing has to be waited for, now or later.
                made.spec = spec
        return Launch(
            self._name,
            spec,
            made.reads,
            made.writes,
            made.allocations,
            (),
            made.written,
            made.used,
            (),
            self._library,
            None,
            number,
            arrivals,
        )

    def _fields_on(self, blocks: tuple[int, ...]) -> list[Any]:
        """The fields of a specification, but for host arrays; the next call changes them."""
        fields: list[Any] = self._fields
        for index, place, layout in self._arrays:
            block = blocks[place]
            if fields[index].block != block:
                # Most operands are those of the launch before.
                fields[index] = ArraySpec(block, *layout)
        return fields

    def _with_hosts(
        self, blocks: tuple[int, ...], arrivals: list[Arrival], shared: Callable[..., npt.NDArray[Any]]
    ) -> OperationSpec:
        fields = self._fields_on(blocks)
        for index, where in self._hosts:
            fields[index] = shared(arrivals, *where)
        spec = self._cls(*fields)
        for index, _ in self._hosts:
            # Whoever takes the memory back finds no array of this form in it.
            fields[index] = None
        return spec
