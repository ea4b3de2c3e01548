"""The CUDA context of one open device, and the driver's error codes.

Every library of a device calls the driver in one `CudaContext`. It owns a reference to the device's primary
context, which other packages in the process share. This module decides in which thread the context is
current, and whether it counts as lost.

**Current.** Each driver call needs the context in its thread. In a worker nothing else uses CUDA
(`is_alone`), so `make_current` sets the context once for each thread and leaves it there. In the program's
own process `make_current` pushes it and `restore` pops it, because the thread may serve other devices also.
Methods that say "the context is current" rely on the caller for this.

**Lost.** Some codes (`_STICKY`) end a context: every later call in it fails with the same code. Two flags
tell two states apart:

* `is_lost`: the device takes no more work. `lose` sets it, also for a context that the driver still accepts,
  such as that of a poisoned or stuck device.
* `is_dead`: the driver reported a sticky code, so that it no longer takes memory back. Only `lose_to` sets
  it.

A context never recovers, and is lost at most once: the first reason stays, and `failure` makes a new error of
it for every caller. The order within `lose` matters: the callbacks of `before_loss` run first, under the
lock, so nobody sees a lost context before they have run. They must not call `lose` themselves, because the
lock is not reentrant.

The driver reports asynchronous faults in some later, unrelated call. Therefore each call must go through
`check`, which marks the context as lost and raises its first reason instead of this call's code. The driver
also hands out a lost primary context again, without an error, as long as anyone in the process retains it
(D1). So the constructor queries the context before anything else uses it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cuda.bindings import driver

from ...base import AccelError, ContextPoisonedError, DeviceLostError, DriverError, NotSupportedError

_STICKY = frozenset((
    "CUDA_ERROR_DEINITIALIZED", "CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_CONTAINED", "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED", "CUDA_ERROR_ASSERT", "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_MISALIGNED_ADDRESS", "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED", "CUDA_ERROR_EXTERNAL_DEVICE", "CUDA_ERROR_UNKNOWN",
))  # fmt: skip
"""Codes that end a context: every later call in it fails with the same code."""

_DAMAGING = frozenset({"CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_CONTAINED"})
"""Codes that report broken device memory, or memory that may be broken."""


class CudaMemoryError(MemoryError):
    """The driver has too little memory. The caller knows the number of bytes that it requested."""


def is_sticky(code: int) -> bool:
    """Return whether this code ends the context."""
    return code != 0 and name_of(code) in _STICKY


def name_of(code: int) -> str:
    """Return the driver's name of a code."""
    try:
        return str(driver.CUresult(code).name)
    except ValueError:
        # The driver is newer than its bindings.
        return f"CUDA_ERROR_{int(code)}"


def describe(code: int) -> str:
    """Return the name of a code and the driver's description."""
    status, text = driver.cuGetErrorString(driver.CUresult(code))
    return name_of(code) if status or not text else f"{name_of(code)}: {text.decode()}"


def error_of(code: int, device: str | None = None) -> AccelError | CudaMemoryError:
    """Make the error for a code of the driver other than success."""
    name = name_of(code)
    if name in _STICKY:
        return ContextPoisonedError(
            f"the context is lost: {describe(code)}", device=device, is_memory_damaged=name in _DAMAGING
        )
    if name == "CUDA_ERROR_OUT_OF_MEMORY":
        return CudaMemoryError(describe(code))
    if name == "CUDA_ERROR_NOT_SUPPORTED":
        return NotSupportedError(f"the driver: {describe(code)}", device=device, backend="cuda")
    return DriverError(f"the driver refused: {describe(code)}", code=name, device=device)


def check(result: tuple[Any, ...]) -> Any:
    """Return the values of a call's result, if the call concerns no context.

    Raises:
        AccelError: The call failed.
    """
    if result[0]:
        raise error_of(result[0])
    return result[1] if len(result) == 2 else result[1:]


# The legacy stream's own handle, because the meaning of 0 depends on the configuration of the bindings.
_DEFAULT_STREAM = int(driver.CU_STREAM_LEGACY)
_UNTIMED = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
_NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY


class _Pushed(threading.local):
    """The state of each thread: whether its nested `with` blocks have pushed the context."""

    def __init__(self) -> None:
        self.depth: list[bool] = []


class CudaContext:
    """The primary context of a device, which every library and every other package in the process shares.

    `with context:` makes it current for a block of calls, in any thread. Afterwards the previous context is
    current again, because the program may use the same thread for other devices. In a process without any
    other use of CUDA it stays current.

    Args:
        index: Number of the device among those that the driver shows.
        device: Its name, for errors.
        is_alone: Whether nothing else in the process uses CUDA.

    Raises:
        DeviceLostError: An earlier fault has ended CUDA in this process.
        ContextPoisonedError: An earlier fault has ended the context, and `is_alone` holds.

    Attributes:
        is_lost: Whether it counts as lost: nothing is enqueued any longer.
        is_dead: Whether the driver has reported the loss, so that the driver takes nothing back any longer.
        number: The driver's handle of the device.
    """

    def __init__(self, index: int, device: str, *, is_alone: bool = False) -> None:
        self._device = device
        self._is_alone = is_alone
        check(driver.cuInit(0))
        self.number: Any = check(driver.cuDeviceGet(index))
        self._pushed = _Pushed()
        self._lock = threading.Lock()
        self._loss: str | None = None
        self._is_memory_damaged: bool = False
        self._before_loss: list[Callable[[], None]] = []
        self.is_lost: bool = False
        self.is_dead: bool = False
        try:
            self._handle = check(driver.cuDevicePrimaryCtxRetain(self.number))
            self._address = int(self._handle)
            # D1: the driver hands a lost context out again without an error, while any user in the process
            # keeps it.
            try:
                self.query()
            except BaseException:
                self.release()
                raise
        except ContextPoisonedError as error:
            if is_alone:
                # A worker's error needs no advice: the next worker is the required new process (D1).
                raise
            raise DeviceLostError(
                "an earlier fault has ended CUDA in this process, and only a new process can use it again; "
                "with isolation='process' the device is rebuilt by itself",
                device=device,
            ) from error

    def make_current(self) -> bool:
        """Make it current in this thread; return whether `restore` must follow."""
        # In a worker nothing else uses CUDA, so the context stays current. In the program's own process it
        # is pushed and popped.
        if not self._is_alone:
            # Push without asking whether it is current, which is rare: the query would be a third call.
            return not driver.cuCtxPushCurrent(self._handle)[0]
        if int(driver.cuCtxGetCurrent()[1]) != self._address:
            driver.cuCtxSetCurrent(self._handle)
        return False

    def restore(self) -> None:
        """Make the previous context current again."""
        driver.cuCtxPopCurrent()

    def __enter__(self) -> None:
        self._pushed.depth.append(self.make_current())

    def __exit__(self, *_: object) -> None:
        if self._pushed.depth.pop():
            self.restore()

    def check(self, result: tuple[Any, ...]) -> Any:
        """Return the values of a call's result.

        Raises:
            ContextPoisonedError: The context is lost, by this call or before.
            CudaMemoryError: There is not enough memory.
            AccelError: The call failed otherwise.
        """
        code = result[0]
        if code:
            if is_sticky(code):
                self.lose_to(code)
            raise self.failure() or error_of(code, self._device)
        return result[1] if len(result) == 2 else result[1:]

    def query(self) -> None:
        """Ask the driver whether the context is lost.

        Raises:
            ContextPoisonedError: The context is lost.
        """
        with self:
            # NVIDIA: may also return error codes from previous, asynchronous launches.
            code = driver.cuStreamQuery(_DEFAULT_STREAM)[0]
            if code != _NOT_READY:
                self.check((code,))

    def detect_loss(self) -> None:
        """Ask the driver whether the context is lost; if so, `failure` returns the error from then on."""
        with suppress(ContextPoisonedError):
            self.query()

    def settle(self) -> None:
        """Wait for the default stream. Blocks; the context is current.

        Libraries send data through it when they plan or load, and return before the data has arrived. Our
        streams are non-blocking, so the driver orders neither before the other.

        Raises:
            ContextPoisonedError: The context is lost.
        """
        self.check(driver.cuStreamSynchronize(_DEFAULT_STREAM))

    def order(self, first: int, then: int) -> None:
        """Make stream `then` wait for all work that is enqueued on stream `first` now; both are handles.

        The streams may belong to other packages. This also works in a context that only counts as lost.

        Raises:
            ContextPoisonedError: The context is lost.
            AccelError: The driver does not take a handle.
        """
        with self:
            event = self.check(driver.cuEventCreate(_UNTIMED))
            try:
                self.check(driver.cuEventRecord(event, first))
                self.check(driver.cuStreamWaitEvent(then, event, 0))
            finally:
                # Both streams keep the parts of the event that they need.
                driver.cuEventDestroy(event)

    def load(self, code: bytes) -> Any:
        """Load compiled code; return the driver's library. The context is current."""
        return self.check(driver.cuLibraryLoadData(code, None, None, 0, None, None, 0))

    def function_of(self, kernel: Any) -> Any:
        """Return the function of a loaded kernel, ready to be launched. The context is current."""
        function = self.check(driver.cuKernelGetFunction(kernel))
        with suppress(RuntimeError):
            # Drivers before CUDA 12.4 lack this call. If it fails, the first launch loads the function.
            self.check(driver.cuFuncLoad(function))
        return function

    def take_host(self, nbytes: int) -> int:
        """Take page-locked memory of the host from the driver; see `GpuContext.take_host`."""
        with self:
            return int(self.check(driver.cuMemHostAlloc(nbytes, driver.CU_MEMHOSTALLOC_PORTABLE)))

    def free_host(self, address: int) -> None:
        """Return page-locked memory to the driver."""
        driver.cuMemFreeHost(address)

    def register_host(self, address: int, nbytes: int) -> None:
        """Lock existing pages of host memory; see `GpuContext.register_host`."""
        with self:
            result = driver.cuMemHostRegister(address, nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)
            # A device that was closed with a stuck stream leaves its memory registered, and all devices of a
            # process share the context. So this is not an error.
            if result[0] != driver.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
                self.check(result)

    def unregister_host(self, address: int) -> None:
        """Unlock the pages."""
        if not self.is_dead:
            with self:
                driver.cuMemHostUnregister(address)

    def before_loss(self, callback: Callable[[], None]) -> None:
        """Call a function just before the context counts as lost, in the thread that finds the fault."""
        self._before_loss.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Remove a callback of `before_loss`."""
        if callback in self._before_loss:
            self._before_loss.remove(callback)

    def lose_to(self, code: int) -> None:
        """Mark the context as lost because of the driver's sticky code."""
        self.is_dead = True
        self._is_memory_damaged = self._is_memory_damaged or name_of(code) in _DAMAGING
        self.lose(f"the context is lost: {describe(code)}")

    def lose(self, reason: str) -> None:
        """Mark the context as lost; only the first reason counts."""
        with self._lock:
            if self._loss is not None:
                return
            for callback in tuple(self._before_loss):
                callback()
            self._loss = reason
            self.is_lost = True

    def failure(self) -> ContextPoisonedError | None:
        """Make a new error with the reason why the context is lost; return None while it is usable."""
        if self._loss is None:
            return None
        return ContextPoisonedError(
            self._loss, device=self._device, is_memory_damaged=self._is_memory_damaged
        )

    def release(self) -> None:
        """Release the primary context; other users in the process are not affected."""
        driver.cuDevicePrimaryCtxRelease(self.number)
