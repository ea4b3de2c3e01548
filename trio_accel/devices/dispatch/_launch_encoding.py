"""Writes launches as the application sends them to a worker: whole, or by a template.

Operations that differ from earlier ones in their blocks alone are sent as the number of a launch template and
these blocks: the rest is sent only once.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, TypeAlias, cast

import attrs
import numpy as np

from ...backends.base import DType, HostArray, Ints
from ...backends.base.contract.ops import (
    DESCRIPTORS,
    ArraySpec,
    CopyToHostSpec,
    Descriptor,
    OperationSpec,
    array_key,
    arrays_of,
    map_arrays,
    value_key,
)
from ...backends.base.kit.fast_paths import current_fast_paths
from ...backends.base.kit.kept_plans import KeptPlans
from ..base._library_paths import why_not_found
from ..operations._operation import Launch
from ..wire import _orders
from ..wire._messages import SHORT
from ..wire._protocol import ARRAY, COMPLEX, ENUM, HOST, TUPLE, Message
from ..wire._wire_values import encode_fault

HostEncoder: TypeAlias = Callable[[HostArray], object]
"""Called with each host array; returns the plain values to send instead."""


# Characters, or bytes, of a value in a template: recipes of graphs have some thousands.
_MOST_TEXT = 1 << 16

_AddressOf: TypeAlias = Callable[[HostArray], "Message | None"]

_ID = attrgetter("id")
_BLOCK = attrgetter("block")
# Values of these types stand for themselves.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_NAMES = {id(member): member.value for member in DType}
_PATHS: dict[type[OperationSpec], str] = {}


def encode_launch(launch: Launch, read: HostEncoder, write: HostEncoder, fill: HostEncoder) -> Message:
    """Make plain values of a launch.

    Args:
        launch: The launch.
        read: Called with each host array that the operation reads.
        write: Called with each one that it writes.
        fill: Called with status words, which are filled from the reply.

    Raises:
        TypeError: The specification holds what cannot cross.
    """
    host = write if isinstance(launch.spec, CopyToHostSpec) else read
    return (
        launch.name,
        launch.library,
        encode_spec(launch.spec, host, fill),
        launch.allocations,
        tuple([encode_spec(staged, read) for staged in launch.staged]) if launch.staged else (),
        tuple([encode_spec(copy, read) for copy in launch.behind]) if launch.behind else (),
        tuple(map(_ID, launch.outputs)),
        tuple([(argument, block.id) for argument, block in launch.uses]),
        None if launch.fault is None else encode_fault(launch.fault.fault),
    )


def _nowhere(host: HostArray) -> None:
    """No host array is in memory that a worker shares."""


def result_of(host: HostArray) -> Message:
    """Tell a worker of a host array that is filled from its reply."""
    return "result", DType.of(host.dtype).value, host.shape


class TemplateTable:
    """The launch templates of one worker (D23).

    Two launches have one template if they are the same once their blocks are numbered in the order in which
    they occur. The second of them makes it, as many occur only once.

    Args:
        send: Sends a message to the worker.

    Attributes:
        kept: The templates by the keys of their launches; the worker has exactly these numbers.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._is_on = current_fast_paths().templates
        self._forgotten: list[int] = []
        self.kept: KeptPlans[str] = KeptPlans(on_end=lambda plan: self._forgotten.append(plan.number))

    def find(  # noqa: C901, PLR0915  # calls that would make it shorter take as long as what they do
        self, launch: Launch, host: _AddressOf = _nowhere
    ) -> tuple[int, Ints, tuple[bytes, ...]] | None:
        """Find the template of a launch; a new one is sent, ahead of what is sent next.

        Args:
            launch: The launch. Host arrays are part of the template, by their addresses.
            host: Tells the address of one; None where the worker does not have it.

        Returns:
            Number of the template, the blocks in the order in which they occur, and the packed scalars. None
            where the launch has no template, or is the first of its kind: then it is sent whole.

        Raises:
            TypeError: No other process can import the specification's class.
        """
        if launch.staged or launch.behind or launch.fault is not None or not self._is_on:
            return None
        frame = launch.frame
        spec: Any = launch.spec
        if frame is not None and frame.table is self and frame.plan is not None:
            framed = frame.plan
            if framed.state != "over" and frame.nbytes == (
                launch.allocations[-1][1] if launch.allocations else 0
            ):
                framed.is_used = True
                self.kept.counts.found += 1
                order = tuple(map(_BLOCK, spec.read + spec.updated + spec.written))
                return framed.number, order, (spec.given,)
        found = _spec_key(launch.spec, host)
        if found is None:
            return None
        key, blocks, packed = found
        key += launch.name, launch.library
        for block, nbytes in launch.allocations:
            key.append(nbytes)
            blocks.append(block)
        # A separator, so that blocks of one kind are not taken for those of the next.
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
        kept = self.kept
        plan = kept.plans.get(whole)
        if plan is not None:
            plan.is_used = True
            kept.counts.found += 1
        elif not kept.see(whole):
            # Many launches occur only once, so the second makes the template.
            kept.counts.seen += 1
            return None
        else:
            plain = _encode(launch, positions, host)
            plan = kept.record(whole, launch.name)
            if self._forgotten:
                # Posted in order with the launches, so the worker forgets between the same two.
                self._send(_orders.forget_templates(tuple(self._forgotten)))
                self._forgotten.clear()
            self._send(_orders.template(plan.number, plain))
        # Each block of a chain must occur once, so that their order is that of its arrays.
        if frame is not None and list(map(_BLOCK, spec.arrays)) == list(positions):
            frame.table, frame.plan = self, plan
            frame.nbytes = launch.allocations[-1][1] if launch.allocations else 0
        return plan.number, tuple(positions), packed


def _encode(launch: Launch, positions: Mapping[int, int], host: _AddressOf) -> Message:
    """Make plain values of a launch, with the positions of its blocks in place of their ids."""
    described = launch.spec.descriptor()

    def numbered(array: ArraySpec) -> ArraySpec:
        return ArraySpec(positions[array.block], array.offset, array.dtype, array.shape, array.strides)

    spec = described.make([map_arrays(value, numbered) for value in described.values(launch.spec)])
    return (
        launch.name,
        launch.library,
        encode_spec(spec, host, result_of),
        tuple([(positions[block], nbytes) for block, nbytes in launch.allocations]),
        tuple([positions[output.id] for output in launch.outputs]),
        tuple([(argument, positions[used.id]) for argument, used in launch.uses]),
    )


def _spec_key(
    spec: OperationSpec, address: Callable[[HostArray], Message | None]
) -> tuple[list[Any], list[int], tuple[bytes, ...]] | None:
    """Split a specification into its key, without blocks and packed scalars, and these.

    Specifications with equal keys are the same once they are encoded. None where it holds a value that cannot
    be told from others.

    Args:
        spec: The specification.
        address: Returns the place of a host array; None where that does not say all of it.
    """
    described = DESCRIPTORS[type(spec)]
    if described.keywords:
        return None
    key: list[Any] = [described.cls]
    blocks: list[int] = []
    values, packed = described.values(spec), tuple[bytes, ...]()
    if described.packed or described.status:
        values, packed = _without_contents(described, list(values))
    array: Any
    told: tuple[object, ...] | None
    value: object
    for value in values:
        kind = type(value)
        if kind is ArraySpec:
            array = value
            blocks.append(array.block)
            # `array_key` makes the same part of a key, with a call for each array.
            key += array.offset, id(array.dtype), array.shape, array.strides
        elif kind in _PLAIN and kind is not float:
            # `value_key` makes the same part.
            key += kind, value
            if (kind is bytes or kind is str) and len(value) > _MOST_TEXT:  # type: ignore[arg-type]  # it has one
                # It is not kept for a template that is hardly ever found.
                return None
        elif kind is tuple and (arrays := arrays_of(value)):
            blocks += [array.block for array in arrays]
            key += len(arrays), *[array_key(array) for array in arrays]
        else:
            told = address(cast("HostArray", value)) if kind is np.ndarray else value_key(value)
            if told is None:
                return None
            key += told
    return key, blocks, packed


def _without_contents(described: Descriptor, fields: list[Any]) -> tuple[list[Any], tuple[bytes, ...]]:
    """Take packed scalars out, and of status words all but how many there are."""
    packed = tuple([fields[index] for index in described.packed])
    for index in described.packed:
        fields[index] = None
    for index in described.status:
        fields[index] = getattr(fields[index], "size", None)
    return fields, packed


def encode_spec(spec: OperationSpec, host: HostEncoder, status: HostEncoder | None = None) -> Message:
    """Make plain values of a specification.

    Args:
        spec: Any attrs class that another process can import.
        host: Called with each host array; returns the plain values to send instead.
        status: The same for status words; `host` if there is none.

    Raises:
        TypeError: The class cannot be imported elsewhere, or a field holds something that cannot
            cross (the message names it).
    """
    cls = type(spec)
    values: list[object] = [_PATHS.get(cls) or _path_of(cls)]
    described = DESCRIPTORS[cls]
    if described.has_status:
        host = _by_field(spec, host, status)
    for field in described.values(spec):
        try:
            values.append(_encode_value(field, host))
        except _CannotCrossError as error:
            name = described.fields[len(values) - 1].name
            raise TypeError(
                "a specification that crosses to a worker holds numbers, strings, bytes, None, dtypes, "
                "members of enums, ArraySpec, host arrays and tuples of these; "
                f"{cls.__qualname__}.{name} is {SHORT.repr(field)}{error}"
            ) from None
    return tuple(values)


def _by_field(spec: OperationSpec, host: HostEncoder, status: HostEncoder | None) -> HostEncoder:
    """Encode status words by one function, and other host arrays by another."""
    if status is None:
        return host
    fields = spec.descriptor().fields
    words = {id(getattr(spec, field.name)) for field in fields if field.role.kind == "status"}
    return lambda array: status(array) if id(array) in words else host(array)


def _path_of(cls: type[OperationSpec]) -> str:
    """Tell where another process finds a specification class.

    Raises:
        TypeError: It cannot, or the class is no attrs class.
    """
    try:
        path = _class_path(cls)
    except _CannotCrossError as error:
        raise TypeError(
            f"a specification that crosses to a worker is of a class that another process can import{error}"
        ) from None
    if not attrs.has(cast("type[object]", cls)):
        raise TypeError(
            f"a specification that crosses to a worker is an attrs class; {cls.__qualname__} is not"
        )
    _PATHS[cls] = path
    return path


class _CannotCrossError(Exception):
    """The value that is being encoded cannot cross; the text says more than the value does, or nothing."""


def _encode_value(value: object, host: HostEncoder) -> object:
    """Make plain values of one.

    Raises:
        _CannotCrossError: It cannot cross.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is ArraySpec:
        array = cast("ArraySpec", value)
        return ARRAY, int(array.block), _layout_of(array.offset, id(array.dtype), array.shape, array.strides)
    if kind is tuple:
        return TUPLE, *[_encode_value(item, host) for item in cast("tuple[object, ...]", value)]
    if isinstance(value, enum.Enum):
        return ENUM, _class_path(kind), _encode_value(value.value, host)
    if kind is complex or issubclass(kind, np.generic):
        return _encode_number(value)
    if isinstance(value, np.ndarray):
        return HOST, host(cast("HostArray", value))
    raise _CannotCrossError


@functools.lru_cache(1024)
def _layout_of(offset: int, dtype: int, shape: Ints, strides: Ints) -> Message:
    """Return all of an array but its block; a pickle has one that occurs again only once.

    Args:
        offset: Offset in the block.
        dtype: Identity of the dtype: its hash takes longer than all the rest.
        shape: Extents.
        strides: Steps.
    """
    # The integers are made exact: NumPy would pickle extents and steps that came from it.
    return int(offset), _NAMES[dtype], tuple(map(int, shape)), tuple(map(int, strides))


def _encode_number(value: Any) -> object:
    plain: object = value if type(value) is complex else value.item()
    if type(plain) is complex:
        # The pickler calls Python for these.
        return COMPLEX, plain.real, plain.imag
    if type(plain) not in _PLAIN:
        raise _CannotCrossError(f", a {type(value).__name__}")
    return plain


def _class_path(cls: type[object]) -> str:
    """Tell where another process finds a class.

    Raises:
        _CannotCrossError: It does not.
    """
    why = why_not_found(cls)
    if why is not None:
        raise _CannotCrossError(f": {cls.__module__}.{cls.__qualname__} {why}")
    return f"{cls.__module__}:{cls.__qualname__}"


def encode_array(array: HostArray) -> Message:
    """Make plain values of a small host array: dtype, shape and bytes in C order.

    Raises:
        TypeError: Devices have no such dtype.
    """
    return DType.of(array.dtype).value, array.shape, array.tobytes()
