"""How a launch is written in a message: what the application, which writes it, and the worker both know.

A launch is its name, the import path of its library, the specification, id and bytes of the blocks to be
made, what is staged for it, ids of the blocks that it writes, arguments that exist already and their blocks,
and the fault that is to hit it.

A specification is the import path of its class and the values of its fields. A value that is not plain is a
tuple that begins with one of the tags.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from ....backends.base import DType
from ...operations._faults import Fault
from ._codec import Message
from ._wire_errors import decode_error, encode_error

__all__ = [
    "ALLOCATIONS",
    "ARRAY",
    "COMPLEX",
    "DTYPES",
    "ENUM",
    "HOST",
    "NAME",
    "OUTPUTS",
    "TUPLE",
    "Wire",
    "decode_fault",
    "encode_fault",
]

Wire: TypeAlias = tuple[object, ...]
"""Real numbers, strings, bytes, None and tuples of these: what the pickler writes without calling Python."""

TUPLE, ARRAY, COMPLEX, ENUM, HOST = range(5)
"""Tags: the first item of every tuple that stands for a value."""

NAME, ALLOCATIONS, OUTPUTS = 0, 3, 5
"""Where the operation's name, the blocks to be made and those that it writes stand in an encoded launch."""

DTYPES = {member.value: member for member in DType}
"""The dtypes by their names."""


def encode_fault(fault: Fault) -> Message:
    """Make plain values of a fault."""
    return fault.kind, fault.how, fault.seconds, None if fault.error is None else encode_error(fault.error)


def decode_fault(data: Any) -> Fault:
    """Make a fault of what `encode_fault` made of it."""
    kind, how, seconds, error = data
    return Fault(kind=kind, how=how, seconds=seconds, error=None if error is None else decode_error(error))
