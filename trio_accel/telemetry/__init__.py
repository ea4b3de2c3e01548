"""What an operator sees of a running program: metrics, traces, logs."""

from ._recorder import Recorder, record
from ._snapshot import (
    ActorRow,
    DeviceRow,
    FailureRow,
    Histogram,
    LibraryRow,
    MemoryRow,
    OperationRow,
    SystemSnapshot,
)
from ._traces import trace

__all__ = [
    "ActorRow",
    "DeviceRow",
    "FailureRow",
    "Histogram",
    "LibraryRow",
    "MemoryRow",
    "OperationRow",
    "Recorder",
    "SystemSnapshot",
    "record",
    "trace",
]
