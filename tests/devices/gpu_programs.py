"""Programs for a GPU with host-visible memory, like the stand-in driver's: NumPy is their GPU library.

Workers import this module.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from typing import Any

import attrs
import numpy as np
import trio
from cuda.bindings import driver

import trio_accel as ta
from trio_accel.programs import Array


def check(result: Any) -> Any:
    assert not int(result[0]), result[0]
    return result[1] if len(result) > 1 else None


def host_of(array: Any) -> Any:
    """A NumPy array over the memory of an array, when its stream has got there."""
    interface = array.__cuda_array_interface__
    if interface["stream"] is not None:
        check(driver.cuStreamSynchronize(interface["stream"]))
    shape, dtype = interface["shape"], np.dtype(interface["typestr"])
    strides = interface["strides"] or np.empty(shape, dtype).strides
    if not math.prod(shape):
        return np.empty(shape, dtype)
    reach = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (reach + dtype.itemsize)).from_address(interface["data"][0])
    return np.ndarray(shape, dtype, memory, 0, strides)


@attrs.define(eq=False)
class GpuArray:
    """An array of a GPU library: it has its own memory."""

    address: int
    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, host: Any) -> GpuArray:
        host = np.ascontiguousarray(host)
        array = cls(int(check(driver.cuMemAlloc(max(host.nbytes, 1)))), host.shape, host.dtype)
        host_of(array)[...] = host
        return array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "stream": None,
        }


def doubled(x: Array) -> Any:
    return GpuArray.of(host_of(x) * 2)


@ta.programs.method(out=lambda x: (x.shape, "float64"))
def declared(x: Array) -> Any:
    return GpuArray.of(host_of(x) + 1)


@ta.programs.method(updates=["x"])
def add(x: Array, *, number: float) -> None:
    host_of(x)[...] += number


def peaks(of: dict[str, Array], *, count: int) -> tuple[Any, float, None]:
    """Indices of a sum's largest elements, a number, and nothing."""
    total = host_of(of["a"]) + host_of(of["b"])
    return GpuArray.of(np.argsort(total)[::-1][:count]), float(total.max()), None


COPIES: list[GpuArray] = []
"""Those that `copies_late` has made."""


def copies_late(_: Array, x: Array) -> Any:
    """Have the stream wait for 0.1 s and copy an argument, and raise at once."""
    interface, copy = x.__cuda_array_interface__, GpuArray.of(np.zeros(x.shape))
    # The C library's function has the signature of a function called by a stream.
    usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
    check(driver.cuLaunchHostFunc(interface["stream"], driver.CUhostFn(usleep), 100_000))
    nbytes = 8 * math.prod(x.shape)
    check(driver.cuMemcpyDtoDAsync(copy.address, interface["data"][0], nbytes, interface["stream"]))
    COPIES.append(copy)
    raise KeyError("too late")


@ta.programs.method(enqueues=True)
def copies_late_in_the_loop(_: Array, x: Array) -> Any:
    copies_late(_, x)


def copied(x: Array) -> Any:
    """Return the last copy of `copies_late`."""
    return host_of(COPIES[-1]).copy()


class Layer:
    """``tanh(x @ weights + bias)``."""

    def __init__(self, parameters: dict[str, Array], path: str = "") -> None:
        self.weights, self.bias = parameters["weights"], parameters["bias"]
        self.copied = host_of(self.weights).copy()
        self.kept: Any = None
        if path:
            with open(path, "a") as file:
                file.write(f"{os.getpid()}\n")

    def _forward(self, x: Array) -> Any:
        return np.tanh(host_of(x) @ host_of(self.weights) + host_of(self.bias))

    def forward(self, x: Array) -> Any:
        return GpuArray.of(self._forward(x))

    def on_the_host(self, x: Array) -> Any:
        return self._forward(x)

    @ta.programs.method(out=lambda x: ((x.shape[0], 3), x.dtype))
    def written(self, x: Array, *, out: Array = None) -> None:
        host_of(out)[...] = self._forward(x)

    @ta.programs.method(out=lambda x: ((x.shape[0], 3), x.dtype))
    def declared(self, x: Array) -> Any:
        return self.forward(x)

    @ta.programs.method(updates=["x"])
    def double(self, x: Array) -> None:
        host_of(x)[...] *= 2

    def transposed(self, x: Array) -> Any:
        made = GpuArray.of(host_of(x))
        size = made.dtype.itemsize
        made.shape, made.strides = x.shape[::-1], (size, x.shape[1] * size)
        return {"turned": made, "same": x, "weights": self.weights, "empty": np.empty((0, 2)), "number": 3}

    def about(self, x: Array) -> Any:
        interface = x.__cuda_array_interface__
        return {
            "read only": x.is_read_only,
            "flag": interface["data"][1],
            "has stream": interface["stream"] is not None,
            "weights have stream": self.weights.__cuda_array_interface__["stream"] is not None,
            "copied": float(self.copied.sum()),
        }

    def keep(self, x: Array) -> None:
        self.kept = x

    def use_kept(self) -> Any:
        return host_of(self.kept).sum()

    def fails(self, x: Array) -> None:
        raise ZeroDivisionError(f"of {x.shape}")

    def runs_out(self) -> None:
        raise MemoryError("no room")

    def streams(self, x: Array) -> Any:
        return [
            sys.modules["torch"].used[-1],
            sys.modules["cupy"].used[-1],
            x.__cuda_array_interface__["stream"],
        ]

    def takes_another_stream(self) -> int:
        """Leave another one current; returns the old one."""
        torch = sys.modules["torch"].cuda
        before: int = torch.current_stream(0).cuda_stream
        torch.set_stream(torch.ExternalStream(77, device=0))
        return before

    def crosses(self, x: Array) -> Any:
        """Take it by DLPack on streams of one's own."""
        own = check(driver.cuStreamCreate(1))
        capsules = [
            x.__dlpack__(stream=int(own)),
            x.__dlpack__(stream=int(own), max_version=(1, 0)),
            x.__dlpack__(stream=x.__cuda_array_interface__["stream"]),
            x.__dlpack__(stream=-1),
            x.__dlpack__(),
        ]
        check(driver.cuStreamSynchronize(own))
        check(driver.cuStreamDestroy(own))
        return len(capsules)


class Marks:
    """Returns the marks of a constructor's array."""

    def __init__(self, state: Array, other: Array) -> None:
        self.state, self.other = state, other

    @ta.programs.method(updates=["self.state"])
    def declared(self) -> list[bool]:
        return self.undeclared()

    @ta.programs.method(updates=["self.other"])
    def undeclared(self) -> list[bool]:
        return [self.state.is_read_only, self.other.is_read_only]

    def plain(self) -> list[bool]:
        return self.undeclared()


class Enqueues:
    """Methods that claim only to enqueue."""

    def __init__(self) -> None:
        self.calls = 0
        self.numbers: list[int] = []

    @ta.programs.method(enqueues=True)
    def thread(self) -> bool:
        """Whether it is called in the loop."""
        return _is_loop()

    @ta.programs.method(enqueues=True)
    def slow(self, takes_its_time: bool) -> bool:
        if takes_its_time:
            # clock: the time that this work takes decides nothing
            time.sleep(0.25)
        return _is_loop()

    @ta.programs.method(out=lambda x: (x.shape, x.dtype), enqueues=True)
    def declared(self, x: Array) -> Any:
        return GpuArray.of(host_of(x) * 2)

    @ta.programs.method(enqueues=True)
    def undeclared(self, x: Array) -> Any:
        return GpuArray.of(host_of(x) * 2)

    @ta.programs.method(out=lambda x, number: (x.shape, x.dtype), enqueues=True)
    def checked(self, x: Array, number: int) -> Any:
        self.numbers.append(number)
        made = GpuArray.of(host_of(x) * 2)
        if number < 0:
            raise ta.programs.Refused("a number below zero")
        if not number:
            raise ZeroDivisionError("it is made again")
        return made

    @ta.programs.method(out=lambda x, fails: None, updates=["x"], enqueues=True)
    def doubles(self, x: Array, fails: bool) -> None:
        host_of(x)[...] *= 2
        if fails:
            raise ValueError("half way")

    def count(self) -> int:
        return len(self.numbers)

    @ta.programs.method(out=lambda x: (x.shape, x.dtype))
    def in_thread(self, x: Array) -> Any:
        return GpuArray.of(host_of(x) * 2)

    @ta.programs.method(out=lambda kept, x: None, updates=["kept"])
    def adds(self, kept: Array, x: Array) -> None:
        host_of(kept)[...] += host_of(x)


def _is_loop() -> bool:
    """Whether Trio runs in this thread."""
    try:
        trio.lowlevel.current_trio_token()
    except RuntimeError:
        return False
    return True
