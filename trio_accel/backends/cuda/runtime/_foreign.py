"""Streams and memory of other libraries: handles, how our streams follow theirs, and what they reserve."""

from __future__ import annotations

import operator
import sys
from contextlib import suppress
from typing import Any, SupportsIndex

from cuda.bindings import driver

from ._context import CudaContext
from ._stream import CudaStream

__all__ = ["follow", "handle_of", "reserved_by_others"]

_LEGACY = int(driver.CU_STREAM_LEGACY)
_UNTIMED = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)


def handle_of(stream: object) -> int:
    """The driver's handle of a stream of any library.

    Args:
        stream: A handle, an object with ``__cuda_stream__`` (`cuda.core`), ``ptr`` (CuPy) or ``cuda_stream``
            (PyTorch), a stream of `cuda.bindings`, or None for the legacy default stream.

    Raises:
        TypeError: It is none of these.
        ValueError: A handle that is negative.
    """
    handle = _number_of(stream)
    if handle is None:
        raise TypeError(
            "lease: stream must be a handle, or an object with __cuda_stream__, .ptr or .cuda_stream, "
            f"got {stream!r}"
        )
    if handle < 0:
        raise ValueError(f"lease: stream: {handle} is no handle of a stream")
    # What 0 means depends on how the bindings were told to read it.
    return handle or _LEGACY


def _number_of(stream: object) -> int | None:
    if stream is None:
        return _LEGACY
    if isinstance(stream, SupportsIndex) and not isinstance(stream, bool):
        # An array has an index, too, if it has one element.
        with suppress(TypeError):
            return operator.index(stream)
    if isinstance(stream, driver.CUstream):
        return int(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if callable(protocol):
        match protocol():
            case (0, SupportsIndex() as handle):
                return operator.index(handle)
            case _:
                return None
    handles = (getattr(stream, name, None) for name in ("cuda_stream", "ptr"))
    return next((handle for handle in handles if isinstance(handle, int)), None)


def follow(stream: CudaStream, handle: int, context: CudaContext) -> None:
    """Hold a stream back until everything is done that was enqueued so far on one of somebody else's.

    Also on a closed stream, and in a context that only counts as lost.

    Raises:
        ContextPoisonedError: The context is lost.
        AccelError: The driver does not take the handle.
    """
    with context:
        event = context.check(driver.cuEventCreate(_UNTIMED))
        try:
            context.check(driver.cuEventRecord(event, handle))
            context.check(driver.cuStreamWaitEvent(stream.handle, event, 0))
        finally:
            # Both streams keep what they need of it.
            driver.cuEventDestroy(event)


def reserved_by_others(index: int) -> int:
    """Bytes of a device's memory that PyTorch and CuPy have taken in this process, if they are imported."""
    reserved = 0
    # Another thread may be importing one: then there is not all of it.
    torch: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if hasattr(torch, "memory_reserved") and torch.is_initialized():
        reserved += int(torch.memory_reserved(index))
    cupy: Any = sys.modules.get("cupy")
    if hasattr(cupy, "get_default_memory_pool"):
        with cupy.cuda.Device(index):
            reserved += int(cupy.get_default_memory_pool().total_bytes())
    return reserved
