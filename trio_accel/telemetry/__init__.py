"""Views of a running program for its operator: metrics, traces, logs, and a socket for other programs."""

from ._dashboard import Dashboard, open_dashboard
from ._gpus import GpuProcess, GpuReading, GpuWatch, XidEvent, read_gpus, watch_gpus
from ._loop_watch import LoopWatch, SlowStep, watch_loop
from ._metrics import exposition, prometheus, prometheus_gpus
from ._opentelemetry import add_histograms, export_metrics
from ._protocol import ObservedProgram, ObserverSocketError, list_programs
from ._recorder import Recorder, record
from ._snapshot import (
    ActorMemoryRow,
    ActorRow,
    CacheRow,
    DeviceRow,
    FailureRow,
    Histogram,
    LibraryRow,
    MemoryRow,
    OperationRow,
    SystemSnapshot,
)
from ._socket import Observation, ObserverSocket, open_observation, open_socket
from ._traces import Timeline, timeline, trace

__all__ = [
    "ActorMemoryRow",
    "ActorRow",
    "CacheRow",
    "Dashboard",
    "DeviceRow",
    "FailureRow",
    "GpuProcess",
    "GpuReading",
    "GpuWatch",
    "Histogram",
    "LibraryRow",
    "LoopWatch",
    "MemoryRow",
    "Observation",
    "ObservedProgram",
    "ObserverSocket",
    "ObserverSocketError",
    "OperationRow",
    "Recorder",
    "SlowStep",
    "SystemSnapshot",
    "Timeline",
    "XidEvent",
    "add_histograms",
    "export_metrics",
    "exposition",
    "list_programs",
    "open_dashboard",
    "open_observation",
    "open_socket",
    "prometheus",
    "prometheus_gpus",
    "read_gpus",
    "record",
    "timeline",
    "trace",
    "watch_gpus",
    "watch_loop",
]
