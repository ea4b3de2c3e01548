"""The current streams of PyTorch and CuPy, in threads that call a program."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import attrs


class CurrentStreams:
    """Makes a stream the current one of PyTorch and CuPy, where this process has imported them.

    Args:
        index: Number of the device.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        # The keys are handles. CuPy's objects must be kept while they are current.
        self._torch: dict[int, Any] = {}
        self._cupy: dict[int, Any] = {}
        self._loop: int | None = None

    def note_loop(self) -> None:
        """Note that this thread is the loop's, which others also use."""
        self._loop = threading.get_ident()

    def of_call(self, handle: int) -> AbstractContextManager[object]:
        """Make a stream the current one for a call: in the program's own thread for good."""
        if threading.get_ident() == self._loop:
            return self.current(handle)
        self._use(handle)
        return nullcontext()

    def are_current(self, handle: int) -> bool:
        """Return whether it is the current stream of this thread, in both libraries."""
        torch, cupy = _torch_streams(), _cupy_streams()
        return (torch is None or torch.current_stream(self._index).cuda_stream == handle) and (
            cupy is None or cupy.get_current_stream().ptr == handle
        )

    def _use(self, handle: int) -> list[Callable[[], object]]:
        """Make it so in this thread, if it is not; returns what makes the streams of before current again."""
        undo: list[Callable[[], object]] = []
        torch = _torch_streams()
        if torch is not None:
            previous = torch.current_stream(self._index)
            if previous.cuda_stream != handle:
                if handle not in self._torch:
                    self._torch[handle] = torch.ExternalStream(handle, device=self._index)
                torch.set_stream(self._torch[handle])
                undo.append(partial(torch.set_stream, previous))
        cupy = _cupy_streams()
        if cupy is not None:
            self._use_in_cupy(cupy, handle, undo)
        return undo

    def _use_in_cupy(self, cupy: Any, handle: int, undo: list[Callable[[], object]]) -> None:
        device = cupy.runtime.getDevice()
        if device != self._index:
            cupy.Device(self._index).use()
            undo.append(cupy.Device(device).use)
        previous = cupy.get_current_stream()
        if previous.ptr != handle:
            if handle not in self._cupy:
                self._cupy[handle] = self._of_cupy(cupy, handle)
            self._cupy[handle].use()
            # Undo in reverse order, because CuPy sets the stream of the current device.
            undo.append(previous.use)

    @contextmanager
    def current(self, handle: int) -> Generator[None]:
        """Make it so for a block, in this thread."""
        undo = self._use(handle)
        try:
            yield
        finally:
            for restore in reversed(undo):
                restore()

    def _of_cupy(self, cupy: Any, handle: int) -> Any:
        """Return a stream of CuPy that does not end ours."""
        if hasattr(cupy.Stream, "from_external"):
            return cupy.Stream.from_external(StreamHandle(handle))
        # This is the class before CuPy 14.
        return cupy.ExternalStream(handle, self._index)


@attrs.frozen
class StreamHandle:
    """A stream, by the protocol for streams of other libraries."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def loaded(module: str, needs: str) -> Any:
    """A module that this process has imported; None while another thread imports it, and is not that far."""
    candidate = sys.modules.get(module)
    return candidate if hasattr(candidate, needs) else None


def _torch_streams() -> Any:
    """Return the module with PyTorch's streams; None where it was built without CUDA, or is not imported."""
    torch: Any = sys.modules.get("torch")
    streams = getattr(torch, "cuda", None)
    has_cuda = getattr(getattr(torch, "version", None), "cuda", None)
    return streams if has_cuda and hasattr(streams, "set_stream") else None


def _cupy_streams() -> Any:
    """Return the module with CuPy's streams; None where it is not imported."""
    streams = getattr(sys.modules.get("cupy"), "cuda", None)
    return streams if hasattr(streams, "get_current_stream") else None
