"""Memory of AMD's and NVIDIA's cards that outlives its process: the driver exports it as a descriptor.

CUDA and HIP have the same ten functions under two prefixes. The module imports nothing but the standard
library and PyTorch, because the child process that looks for devices tries it by its path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Generator
from typing import Any

import torch

_DESCRIPTOR, _PINNED, _DEVICE = 1, 1, 1
_READ, _READ_AND_WRITE = 1, 3
_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DriverMemory:
    """Physical memory of one card, which is mapped where it is used.

    Args:
        where: The card.

    Attributes:
        granularity: Bytes that the size of a chunk is a multiple of.

    Raises:
        OSError: The driver is missing, or refuses.
    """

    def __init__(self, where: torch.device) -> None:
        is_amd = torch.version.hip is not None
        self._prefix = "hipMem" if is_amd else "cuMem"
        self._driver = ctypes.CDLL("libamdhip64.so" if is_amd else "libcuda.so.1")
        self._where = where
        location = _Location(_DEVICE, where.index or 0)
        self._properties = _Properties(_PINNED, _DESCRIPTOR, location, None, 0)
        self._access = {flags: _Access(location, flags) for flags in (_READ, _READ_AND_WRITE)}
        size = ctypes.c_size_t()
        # PyTorch may not have initialised the driver yet.
        with self._current():
            self._call("GetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties), 0)
        self.granularity: int = size.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, self._prefix + name)(*arguments)
        if code == _OUT_OF_MEMORY:
            raise MemoryError(f"{self._prefix}{name}: the card has not so much memory")
        if code:
            raise OSError(code, f"{self._prefix}{name} failed with error {code}")

    @contextlib.contextmanager
    def _current(self) -> Generator[None]:
        """Make the context of the card that of this thread: PyTorch does so at the first question."""
        with torch.cuda.device(self._where):
            torch.cuda.current_stream(self._where).query()
            yield

    def make(self, nbytes: int) -> tuple[torch.Tensor, int, int]:
        """Take memory; returns it as bytes, its size, and a descriptor, which is the caller's.

        Raises:
            MemoryError: The card has not so much.
            OSError: The driver refuses.
        """
        size = -(-max(nbytes, 1) // self.granularity) * self.granularity
        handle, descriptor = ctypes.c_uint64(), ctypes.c_int()
        with self._current():
            self._call(
                "Create",
                ctypes.byref(handle),
                ctypes.c_size_t(size),
                ctypes.byref(self._properties),
                ctypes.c_uint64(),
            )
            try:
                self._call(
                    "ExportToShareableHandle",
                    ctypes.byref(descriptor),
                    handle,
                    _DESCRIPTOR,
                    ctypes.c_uint64(),
                )
                try:
                    return self._mapped(handle, size, _READ_AND_WRITE), size, descriptor.value
                except BaseException:
                    os.close(descriptor.value)
                    raise
            finally:
                # The mapping and the descriptor hold the memory.
                self._call("Release", handle)

    def map(self, nbytes: int, descriptor: int, *, write: bool) -> torch.Tensor:
        """Map the memory of a descriptor, which stays the caller's.

        Raises:
            OSError: It is not memory of this card.
            ValueError: It is not the size of the chunk.
        """
        if nbytes <= 0 or nbytes % self.granularity:
            raise ValueError(f"nbytes must be a multiple of {self.granularity}, got {nbytes}")
        handle = ctypes.c_uint64()
        with self._current():
            given = ctypes.c_void_p(descriptor)
            self._call("ImportFromShareableHandle", ctypes.byref(handle), given, _DESCRIPTOR)
            try:
                return self._mapped(handle, nbytes, _READ_AND_WRITE if write else _READ)
            except OSError as error:
                raise ValueError(f"nbytes: {nbytes} cannot be mapped of this chunk: {error}") from error
            finally:
                self._call("Release", handle)

    def _mapped(self, handle: ctypes.c_uint64, nbytes: int, flags: int) -> torch.Tensor:
        address, size, zero = ctypes.c_uint64(), ctypes.c_size_t(nbytes), ctypes.c_uint64()
        self._call("AddressReserve", ctypes.byref(address), size, ctypes.c_size_t(), zero, zero)
        try:
            self._call("Map", address, size, ctypes.c_size_t(), handle, zero)
            try:
                self._call("SetAccess", address, size, ctypes.byref(self._access[flags]), ctypes.c_size_t(1))
            except BaseException:
                self._call("Unmap", address, size)
                raise
        except BaseException:
            self._call("AddressFree", address, size)
            raise
        owner = _Owner(address.value, nbytes)
        # The last tensor over the memory holds the owner. After a fault only the end of the process helps.
        weakref.finalize(owner, self._unmap, address.value, nbytes).atexit = False
        return torch.as_tensor(owner, device=self._where)

    def _unmap(self, address: int, nbytes: int) -> None:
        with contextlib.suppress(OSError, RuntimeError), self._current():
            self._call("Unmap", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
            self._call("AddressFree", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))


class _Owner:
    """What a tensor over mapped memory keeps."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def why_not(where: str) -> str:
    """Tell why the memory of a card ends with its process; empty if it does not."""
    kind, _, number = where.partition(":")
    if kind != "cuda":
        return "PyTorch exports no memory of such devices"
    try:
        chunk, _, descriptor = DriverMemory(torch.device(kind, int(number))).make(1)
        os.close(descriptor)
        del chunk
    except (AttributeError, OSError, MemoryError, RuntimeError) as error:
        return str(error)
    return ""
