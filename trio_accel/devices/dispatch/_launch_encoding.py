"""Encodes launches for a worker, with or without a template.

A launch that differs from earlier ones only in its blocks and packed scalars is sent as the number of a
template, the blocks and the scalars (`TemplateTable`). The template with the rest is sent only once. All
other launches are sent completely (`encode_launch`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, TypeAlias, cast

import numpy as np

from ...backends.base import HostArray, Ints
from ...backends.base.contract.ops import (
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
from ..operations._operation import Launch
from ..wire import _orders
from ..wire._protocol import Message
from ..wire._specs import PLAIN, HostEncoder, encode_spec, result_of
from ..wire._wire_values import encode_fault

# The maximum length of a string or bytes value in a template. Recipes of graphs have some thousand bytes.
_MOST_TEXT = 1 << 16

_AddressOf: TypeAlias = Callable[[HostArray], "Message | None"]

_ID = attrgetter("id")
_BLOCK = attrgetter("block")


def encode_launch(launch: Launch, read: HostEncoder, write: HostEncoder, fill: HostEncoder) -> Message:
    """Encode a launch as plain values.

    Args:
        launch: The launch.
        read: Encodes a host array that the operation reads.
        write: Encodes a host array that it writes.
        fill: Encodes status words, which are filled from the reply.

    Raises:
        TypeError: The specification holds a value that cannot be encoded.
    """
    host = write if isinstance(launch.spec, CopyToHostSpec) else read
    return (
        launch.name,
        launch.library,
        encode_spec(launch.spec, host, fill),
        launch.allocations,
        tuple([encode_spec(staged, read) for staged in launch.staged]) if launch.staged else (),
        tuple([encode_spec(copy, read) for copy in launch.result_copies]) if launch.result_copies else (),
        tuple(map(_ID, launch.outputs)),
        tuple([(argument, block.id) for argument, block in launch.uses]),
        None if launch.fault is None else encode_fault(launch.fault.fault),
    )


def _nowhere(host: HostArray) -> None:
    """Return None, because no host array is in memory that a worker shares."""


class TemplateTable:
    """The launch templates of one worker (D23).

    Two launches have the same template if they are equal after their blocks are numbered in order of
    occurrence. The second launch makes the template, because many launches occur only once.

    Args:
        send: Sends a message to the worker.

    Attributes:
        kept: The templates by the keys of their launches. The worker has them all under the same numbers.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._is_on = current_fast_paths().templates
        self._forgotten: list[int] = []
        self.kept: KeptPlans[str] = KeptPlans(on_end=lambda plan: self._forgotten.append(plan.number))

    def find(  # noqa: C901, PLR0915  # calls that would make it shorter take as long as what they do
        self, launch: Launch, host: _AddressOf = _nowhere
    ) -> tuple[int, Ints, tuple[bytes, ...]] | None:
        """Find the template of a launch, or make it and send it to the worker.

        Args:
            launch: The launch. Host arrays are part of the template, by their addresses.
            host: Returns the address of a host array; None if the worker does not have it.

        Returns:
            The number of the template, the blocks in order of occurrence, and the packed scalars. None if the
            launch must be sent completely, because it cannot have a template or is the first of its kind.

        Raises:
            TypeError: Other processes cannot import the specification's class.
        """
        if launch.staged or launch.result_copies or launch.fault is not None or not self._is_on:
            return None
        frame = launch.frame
        spec: Any = launch.spec
        # A repeated chain remembers its template, so that no key is computed.
        if frame is not None and frame.table is self and frame.plan is not None:
            framed = frame.plan
            if framed.state != "over" and frame.nbytes == (
                launch.allocations[-1][1] if launch.allocations else 0
            ):
                framed.is_used = True
                self.kept.counts.hits += 1
                order = tuple(map(_BLOCK, spec.read + spec.updated + spec.written))
                return framed.number, order, (spec.host_data,)
        parts = _spec_key(launch.spec, host)
        if parts is None:
            return None
        key, blocks, packed = parts
        key += launch.name, launch.library
        for block, nbytes in launch.allocations:
            key.append(nbytes)
            blocks.append(block)
        # Separate the lists of blocks, so that keys with equal numbers but other lists differ.
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
        full_key = tuple(key)
        cache = self.kept
        plan = cache.plans.get(full_key)
        if plan is not None:
            plan.is_used = True
            cache.counts.hits += 1
        elif not cache.see(full_key):
            cache.counts.unplanned += 1
            return None
        else:
            plain = _encode_template(launch, positions, host)
            plan = cache.record(full_key, launch.name)
            if self._forgotten:
                # Send this in order with the launches, so that the worker forgets at the same point.
                self._send(_orders.forget_templates(tuple(self._forgotten)))
                self._forgotten.clear()
            self._send(_orders.template(plan.number, plain))
        # The shortcut above lists blocks in the order of the chain's arrays, so each must occur only once.
        if frame is not None and list(map(_BLOCK, spec.arrays)) == list(positions):
            frame.table, frame.plan = self, plan
            frame.nbytes = launch.allocations[-1][1] if launch.allocations else 0
        return plan.number, tuple(positions), packed


def _encode_template(launch: Launch, positions: Mapping[int, int], host: _AddressOf) -> Message:
    """Encode a launch as a template, with the positions of its blocks in place of their ids."""
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
    """Split a specification into a key without blocks and packed scalars, the blocks, and the scalars.

    Specifications with equal keys have equal encodings.

    Args:
        spec: The specification.
        address: Returns the address of a host array; None if the address does not describe it completely.

    Returns:
        None if the specification has keyword fields, or a value that is too long or cannot be compared.
    """
    described = spec.described
    if described.keywords:
        return None
    key: list[Any] = [described.cls]
    blocks: list[int] = []
    values, packed = described.values(spec), tuple[bytes, ...]()
    if described.packed or described.status:
        values, packed = _without_contents(described, list(values))
    array: Any
    key_part: tuple[object, ...] | None
    value: object
    for value in values:
        kind = type(value)
        if kind is ArraySpec:
            array = value
            blocks.append(array.block)
            # The same as `array_key`, without a call for each array.
            key += array.offset, id(array.dtype), array.shape, array.strides
        elif kind in PLAIN and kind is not float:
            # The same as `value_key`, without a call. It is needed for floats, because it distinguishes -0.0.
            key += kind, value
            if (kind is bytes or kind is str) and len(value) > _MOST_TEXT:  # type: ignore[arg-type]  # it has one
                # Such a value hardly ever occurs again.
                return None
        elif kind is tuple and (arrays := arrays_of(value)):
            blocks += [array.block for array in arrays]
            key += len(arrays), *[array_key(array) for array in arrays]
        else:
            key_part = address(cast("HostArray", value)) if kind is np.ndarray else value_key(value)
            if key_part is None:
                return None
            key += key_part
    return key, blocks, packed


def _without_contents(described: Descriptor, fields: list[Any]) -> tuple[list[Any], tuple[bytes, ...]]:
    """Return fields without the packed scalars, and with the number of status words instead of the words."""
    packed = tuple([fields[index] for index in described.packed])
    for index in described.packed:
        fields[index] = None
    for index in described.status:
        fields[index] = getattr(fields[index], "size", None)
    return fields, packed
