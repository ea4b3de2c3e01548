"""Contexts in processes of their own: starting them, speaking to them, and coming back from their death."""

from ..._names import export as _export
from ..wire._channel import spin_together as spin_together
from ._calls import Borrowed as Borrowed
from ._chunks import *
from ._worker_dispatch import WorkerDispatch as WorkerDispatch

_export(__name__)
