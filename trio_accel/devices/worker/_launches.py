"""Launches as plain values, and what a worker makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ...backends.base import DType
from ...backends.base.ops import CopyToHostSpec
from .._blocks import Block
from .._faults import Fault, FaultHit, FaultPlan, Faults
from .._operation import Launch
from ._channel import Message
from ._remote_copies import RemoteArray
from ._wire import decode_array, decode_spec, encode_array, encode_spec
from ._wire_errors import decode_error, encode_error

__all__ = ["ALLOCATIONS", "NAME", "OUTPUTS", "HostArrays", "decode_launch", "encode_launch"]

NAME, ALLOCATIONS, OUTPUTS = 0, 3, 5
"""Where the operation's name, the blocks to be made and those that it writes stand in an encoded launch."""


class HostArrays:
    """The host arrays of one request, on the application's side.

    Args:
        by_value: Those up to so many bytes travel with the messages.

    Attributes:
        copied: Those that are copied to or from shared memory, by index.
        filled: Those that are filled from the reply.
    """

    __slots__ = ("_by_value", "copied", "filled")

    def __init__(self, by_value: int) -> None:
        self._by_value = by_value
        self.copied: list[npt.NDArray[Any]] = []
        self.filled: list[npt.NDArray[Any]] = []

    def read(self, host: npt.NDArray[Any]) -> Message:
        """How the worker gets a host array: by value, or by a copy that it asks for."""
        return ("value", encode_array(host)) if host.nbytes <= self._by_value else self._copy(host)

    def write(self, host: npt.NDArray[Any]) -> Message:
        """How a host array is filled: from the reply, or by a copy that the worker asks for."""
        if host.nbytes > self._by_value:
            return self._copy(host)
        self.filled.append(host)
        return "result", DType.of(host.dtype).value, host.shape

    def fill(self, results: Any) -> None:
        """Fill host arrays from the reply."""
        for host, data in zip(self.filled, results, strict=True):
            np.copyto(host, decode_array(data))

    def _copy(self, host: npt.NDArray[Any]) -> Message:
        self.copied.append(host)
        return "copy", len(self.copied) - 1


def encode_launch(launch: Launch, hosts: HostArrays) -> Message:
    """Make plain values of a launch.

    Raises:
        TypeError: The specification holds what cannot cross.
    """
    host = hosts.write if isinstance(launch.spec, CopyToHostSpec) else hosts.read
    return (
        launch.name,
        launch.library,
        encode_spec(launch.spec, host),
        launch.allocations,
        tuple([encode_spec(staged, hosts.read) for staged in launch.staged]),
        tuple([block.id for block in launch.outputs]),
        tuple([(argument, block.id) for argument, block in launch.uses]),
        None if launch.fault is None else _encode_fault(launch.fault.fault),
    )


def decode_launch(
    data: Any, number: int, block: Callable[[int], Block], results: list[npt.NDArray[Any]]
) -> Launch:
    """Make a launch of what `encode_launch` made of it.

    Args:
        data: From `encode_launch`.
        number: Number of the request.
        block: Finds the block of an id.
        results: Takes the host arrays that are to travel with the reply.

    Raises:
        ImportError: This process does not have the specification's module.
    """
    name, library, spec, allocations, staged, outputs, uses, fault = data

    def host(plain: Any) -> npt.NDArray[Any]:
        kind, *rest = plain
        if kind == "value":
            return decode_array(rest[0])
        if kind == "copy":
            return cast("npt.NDArray[Any]", RemoteArray(number, rest[0]))
        results.append(_empty(*rest))
        return results[-1]

    return Launch(
        name,
        decode_spec(spec, host),
        allocations,
        cast("Any", tuple([decode_spec(copy, host) for copy in staged])),
        [block(output) for output in outputs],
        [(argument, block(used)) for argument, used in uses],
        [],
        library,
        None if fault is None else FaultHit(FaultPlan(name, _decode_fault(fault), 1), Faults()),
        number,
    )


def _empty(dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.empty(shape, DType(dtype).dtype)


def _encode_fault(fault: Fault) -> Message:
    return fault.kind, fault.how, fault.seconds, None if fault.error is None else encode_error(fault.error)


def _decode_fault(data: Any) -> Fault:
    kind, how, seconds, error = data
    return Fault(kind=kind, how=how, seconds=seconds, error=None if error is None else decode_error(error))
