"""Launches as plain values, and what a worker makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ....backends.base import DType
from ....backends.base.ops import CopyToHostSpec
from ...arrays._blocks import Block
from ...base._arrival import Arrival
from ...operations._faults import Fault, FaultHit, FaultPlan, Faults
from ...operations._operation import Launch
from ..back._remote_copies import RemoteArray
from ._channel import Message
from ._host_arrays import HostArrays
from ._wire import decode_array, decode_spec, encode_spec
from ._wire_errors import decode_error, encode_error

__all__ = ["ALLOCATIONS", "NAME", "OUTPUTS", "decode_launch", "encode_launch"]

_ID = attrgetter("id")

NAME, ALLOCATIONS, OUTPUTS = 0, 3, 5
"""Where the operation's name, the blocks to be made and those that it writes stand in an encoded launch."""


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
        tuple([encode_spec(staged, hosts.read) for staged in launch.staged]) if launch.staged else (),
        tuple(map(_ID, launch.outputs)),
        tuple([(argument, block.id) for argument, block in launch.uses]),
        None if launch.fault is None else _encode_fault(launch.fault.fault),
    )


def decode_launch(
    data: Any,
    number: int,
    blocks: Mapping[int, Block],
    shared: Callable[..., npt.NDArray[Any]],
    results: list[npt.NDArray[Any]],
) -> Launch:
    """Make a launch of what `encode_launch` made of it.

    Args:
        data: From `encode_launch`.
        number: Number of the request.
        blocks: The blocks by their ids.
        shared: Makes an array over memory of the application's, and adds what must be over before it is used.
        results: Takes the host arrays that are to travel with the reply.

    Raises:
        ImportError: This process does not have the specification's module.
    """
    name, library, spec, allocations, staged, outputs, uses, fault = data
    arrivals: list[Arrival] = []

    def host(plain: Any) -> npt.NDArray[Any]:
        kind, *rest = plain
        if kind == "value":
            return decode_array(rest[0])
        if kind == "copy":
            return cast("npt.NDArray[Any]", RemoteArray(number, rest[0]))
        if kind == "shared":
            return shared(arrivals, *rest)
        results.append(_empty(*rest))
        return results[-1]

    main = decode_spec(spec, host)
    copies: Any = tuple([decode_spec(copy, host) for copy in staged]) if staged else ()
    reads, writes = main.blocks()
    for copy in copies:
        reads |= copy.blocks()[0]
    return Launch(
        name,
        main,
        reads,
        writes,
        allocations,
        copies,
        [blocks[output] for output in outputs],
        [(argument, blocks[used]) for argument, used in uses],
        [],
        library,
        None if fault is None else FaultHit(FaultPlan(name, _decode_fault(fault), 1), Faults()),
        number,
        arrivals,
    )


def _empty(dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.empty(shape, DType(dtype).dtype)


def _encode_fault(fault: Fault) -> Message:
    return fault.kind, fault.how, fault.seconds, None if fault.error is None else encode_error(fault.error)


def _decode_fault(data: Any) -> Fault:
    kind, how, seconds, error = data
    return Fault(kind=kind, how=how, seconds=seconds, error=None if error is None else decode_error(error))
