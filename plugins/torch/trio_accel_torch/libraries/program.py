"""Programs: methods get NumPy arrays on the processor and tensors on a card, in the thread of the stream."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import ref

import numpy as np
import torch

from trio_accel.backends.base import AccelStream, ArraySpec, DType, Ints, kernel, ops
from trio_accel.backends.base.kit.kernels import KernelEntry
from trio_accel.backends.base.kit.lent import Lent
from trio_accel.backends.base.kit.library import ComputingCall
from trio_accel.backends.base.kit.programs import HostProgramArrays, ProgramArrays, ProgramHost

from .._device import TorchDevice, TorchLibrary, refuse
from ..manifest import BACKEND


class ProgramLibrary(TorchLibrary):
    """One program of an open device; blocks while its module is imported and its constructor runs.

    Args:
        name: Name of the library.
        device: The device.
        kernels: None but its own.
        argument: Text of its definition.
    """

    def __init__(
        self, name: str, device: TorchDevice, kernels: Mapping[str, KernelEntry], argument: str
    ) -> None:
        super().__init__(name, device, kernels)
        is_card = device.where.type != "cpu"
        arrays: ProgramArrays = _Arrays(device) if is_card else HostProgramArrays(device)
        self._host = ProgramHost(argument, arrays, device.waited_for)
        self.import_seconds: float = self._host.import_seconds

    def call_of(self, spec: ops.OperationSpec, stream: AccelStream) -> ComputingCall:
        """Make a launch; the errors of methods stay as they are."""
        return ComputingCall(self._kernel_of(spec).function, spec, None, self._device, stream)

    def close(self) -> None:
        """Let go of the program."""
        self._host.close()

    @kernel(ops.ProgramCall, backend=BACKEND)
    @kernel(ops.ProgramReturn, backend=BACKEND)
    @kernel(ops.ProgramNext, backend=BACKEND)
    def _call(self, spec: ops.ProgramCall, call: Any) -> None:
        with self._memory():
            self._host.call(spec)

    @kernel(ops.ProgramResult, backend=BACKEND)
    def _tell(self, spec: ops.ProgramResult, call: Any) -> None:
        self._host.tell(spec)

    @kernel(ops.ProgramFetch, backend=BACKEND)
    def _fetch(self, spec: ops.ProgramFetch, call: Any) -> None:
        with self._memory():
            self._host.fetch(spec)

    @contextmanager
    def _memory(self) -> Generator[None]:
        """Run code of the program's: it may want gradients, and may run out of PyTorch's memory."""
        try:
            with torch.inference_mode(mode=False):
                yield
        except torch.OutOfMemoryError as error:
            raise self._device.exhausted(0) from error


class _Arrays:
    """Arrays of a card, which programs have as tensors; see `ProgramArrays`."""

    def __init__(self, device: TorchDevice) -> None:
        self._device = device

    def view(self, array: ArraySpec, *, write: bool) -> torch.Tensor:
        view = self._device.view(array)
        if view.flips or view.dtype is not None:
            refuse("tensor with negative strides, or with elements at no multiple of their size")
        return view.at

    def dtype_and_shape(self, value: object) -> tuple[str, Ints] | None:
        if isinstance(value, torch.Tensor):
            return DType(str(value.dtype).removeprefix("torch.")).value, tuple(value.shape)
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError("a masked array; fill it first: array.filled(value)")
        if not (isinstance(value, np.ndarray) or hasattr(value, "__dlpack__")):
            return None
        array = _tensor(value)
        return self.dtype_and_shape(array)

    def keep(self, value: object) -> torch.Tensor:
        return _tensor(value).detach().clone()

    def copy(self, source: object, out: object) -> None:
        assert isinstance(out, torch.Tensor)
        out.copy_(_tensor(source).detach())

    def protect(self, views: Sequence[object], *, write: bool) -> None:
        """Do nothing: tensors know no mark."""

    def end(self, views: Sequence[object]) -> Sequence[Lent]:
        return [ref(view) for view in views]

    def rank(self, meeting: Mapping[str, Any], asker: ops.Asker) -> NoReturn:
        refuse("ranks of programs on cards")

    def when_done(self, check: Callable[[], None]) -> None:
        self._device.wait_for_current_stream()
        check()


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else torch.from_dlpack(value)
