"""Launches as plain values: what the application, which writes them, and the worker both know of them.

A launch is its name, the import path of its library, the specification, id and bytes of the blocks to be
made, what is staged for it, ids of the blocks that it writes, arguments that exist already and their blocks,
and the fault that is to hit it.
"""

from __future__ import annotations

from typing import Any

from ...operations._faults import Fault
from ._codec import Message
from ._wire_errors import decode_error, encode_error

__all__ = ["ALLOCATIONS", "NAME", "OUTPUTS", "decode_fault", "encode_fault"]

NAME, ALLOCATIONS, OUTPUTS = 0, 3, 5
"""Where the operation's name, the blocks to be made and those that it writes stand in an encoded launch."""


def encode_fault(fault: Fault) -> Message:
    """Make plain values of a fault."""
    return fault.kind, fault.how, fault.seconds, None if fault.error is None else encode_error(fault.error)


def decode_fault(data: Any) -> Fault:
    """What `encode_fault` made."""
    kind, how, seconds, error = data
    return Fault(kind=kind, how=how, seconds=seconds, error=None if error is None else decode_error(error))
