"""Launches as the application sends them to a worker."""

from __future__ import annotations

from operator import attrgetter

from ....backends.base.ops import CopyToHostSpec
from ...operations._operation import Launch
from ..transport._codec import Message
from ..transport._launches import encode_fault
from ..transport._wire import encode_spec
from ._host_arrays import HostArrays

__all__ = ["encode_launch"]

_ID = attrgetter("id")


def encode_launch(launch: Launch, hosts: HostArrays) -> Message:
    """Make plain values of a launch.

    Raises:
        TypeError: The specification holds what cannot cross.
    """
    host = hosts.write if isinstance(launch.spec, CopyToHostSpec) else hosts.read
    return (
        launch.name,
        launch.library,
        encode_spec(launch.spec, host, hosts.fill_later),
        launch.allocations,
        tuple([encode_spec(staged, hosts.read) for staged in launch.staged]) if launch.staged else (),
        tuple(map(_ID, launch.outputs)),
        tuple([(argument, block.id) for argument, block in launch.uses]),
        None if launch.fault is None else encode_fault(launch.fault.fault),
    )
