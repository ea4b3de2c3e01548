"""A blocking namespace of the Python array API standard, for worker threads."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import ModuleType
from typing import Any, cast

import numpy as np

from .. import arrays, fft, linalg
from ..backends.base import DType, DTypeLike, NotSupportedError
from ..backends.base.contract.values import host_array
from ..devices import AccelRef, Device
from ._array_api_array import Array
from ._array_api_functions import (
    DEFAULTS,
    STANDARD,
    FloatInfo,
    Functions,
    IntegerInfo,
    Typed,
    adapted,
    can_cast,
    finfo,
    iinfo,
    isdtype,
    result_type,
    run,
)  # fmt: skip
from ._blocking import Blocking

__all__ = ["ArrayApi", "array_api"]

_VERSION = "2025.12"
_VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", _VERSION)
# NumPy has them and the standard has not: other libraries look for them, and call them as NumPy's.
_NUMPYS = ("bincount", "compress", "histogram", "pad", "put", "put_along_axis", "split")
_HOST = (1, 3)
"""Kinds of memory that the host addresses, in DLPack: its own, and such that is pinned."""


class _MissingError(NotSupportedError, AttributeError):
    """A function that the namespace has not; an `AttributeError`, as `hasattr` wants it."""


class _Part:
    """A namespace of functions that block.

    Args:
        name: Its name.
        device: Where arrays are made.
        call: Calls an async function, and waits for it.
        adapters: Has functions that the packages have not with the standard's signature.
        packages: Have the others, looked up in this order.
    """

    def __init__(
        self,
        name: str,
        device: Device,
        call: Callable[..., Any],
        adapters: object,
        packages: Sequence[ModuleType],
    ) -> None:
        self.__name__ = name
        self._device = device
        self._call = call
        self._adapters = adapters
        self._packages = packages

    def __getattr__(self, name: str) -> Any:
        # Those of classes are messages and actors.
        is_function = name[0].islower() and name not in _NUMPYS
        found = getattr(self._adapters, name, None) if is_function else None
        for package in self._packages if is_function else ():
            if found is None and name in package.__all__:
                found = adapted(name, getattr(package, name), self._device)
        if found is None:
            raise _MissingError(f"{self.__name__}.{name} is not there")

        @wraps(found)
        def blocking(*args: Any, **kwargs: Any) -> Any:
            return self._call(f"{self.__name__}.{name}", found, *args, **kwargs)

        # A function is the same one whenever it is asked for.
        setattr(self, name, blocking)
        return blocking

    def __dir__(self) -> list[str]:
        """Return the names of the functions, too."""
        names = {name for package in self._packages for name in package.__all__ if name[0].islower()}
        return sorted({*super().__dir__(), *dir(self._adapters), *names}.difference(_NUMPYS))


class _Info:
    """What the namespace can do; see `ArrayApi.__array_namespace_info__`."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def capabilities(self) -> dict[str, bool | int | None]:
        """Return what of the optional behaviour is there."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> Device:
        """Return the device that arrays are made on."""
        return self._device

    def devices(self) -> tuple[Device, ...]:
        """Return the devices of the namespace."""
        return (self._device,)

    def default_dtypes(self, *, device: Device | None = None) -> dict[str, DType]:
        """Return the dtypes of what is made without one."""
        return dict(DEFAULTS)

    def dtypes(
        self, *, device: Device | None = None, kind: str | tuple[str, ...] | None = None
    ) -> dict[str, DType]:
        """Return the dtypes of the standard, all or those of a kind."""
        return {dtype.value: dtype for dtype in STANDARD if kind is None or isdtype(dtype, kind)}


class ArrayApi(_Part):
    """A namespace of the Python array API standard on a device; made by `array_api`.

    Its functions are those of `ta.arrays` and of the extensions `linalg` and `fft`, which are `ta.linalg` and
    `ta.fft`. They block the thread that calls them until the device has the result, and take and return
    `Array`. Python numbers are promoted by the standard. A function that is not there raises
    `NotSupportedError`, which is an `AttributeError`, too.

    Attributes:
        linalg: The extension for linear algebra.
        fft: The extension for Fourier transforms.
    """

    e: float = math.e
    inf: float = math.inf
    nan: float = math.nan
    pi: float = math.pi
    newaxis: None = None
    __array_api_version__: str = _VERSION
    can_cast: staticmethod[[Typed, DTypeLike], bool] = staticmethod(can_cast)
    finfo: staticmethod[[Typed], FloatInfo] = staticmethod(finfo)
    iinfo: staticmethod[[Typed], IntegerInfo] = staticmethod(iinfo)
    isdtype: staticmethod[[DTypeLike, DTypeLike | Sequence[DTypeLike]], bool] = staticmethod(isdtype)
    result_type: staticmethod[..., DType] = staticmethod(result_type)

    def __init__(self, device: Device) -> None:
        self._blocking = Blocking(
            device, maker="array_api", owner="namespace", instead="await ta.arrays.{}(...)"
        )
        functions = Functions(device)
        super().__init__("trio_accel.interop.array_api", device, self.call, functions, (arrays, linalg))
        self.linalg: _Part = _Part("linalg", device, self.call, None, (linalg, arrays))
        self.fft: _Part = _Part("fft", device, self.call, None, (fft,))

    def __getattr__(self, name: str) -> Any:
        """Return a dtype, or a function that blocks.

        Raises:
            NotSupportedError: It is not there.
        """
        return DType.__members__.get(name) or super().__getattr__(name)

    # SciPy and scikit-learn compare the namespaces of their arrays.
    def __eq__(self, other: object) -> bool:
        return self._device is other._device if isinstance(other, ArrayApi) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._device)

    def __repr__(self) -> str:
        return f"<ArrayApi of {self._device.path}>"

    def __array_namespace_info__(self) -> _Info:
        """Return what can be asked about the namespace."""
        return _Info(self._device)

    def check_version(self, api_version: str | None) -> None:
        """Require that a version of the standard is there.

        Raises:
            ValueError: It is not.
        """
        if api_version is not None and api_version not in _VERSIONS:
            raise ValueError(f"api_version must be one of {', '.join(_VERSIONS)}, got {api_version!r}")

    def call(self, name: str, function: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
        """Call a function of arrays, async or not, in the run of the device, and wait for its result.

        Args:
            name: What the program calls, for errors.
            function: The function. It gets and returns `AccelRef` where the program has `Array`.
            *args: Its arguments.
            **kwargs: And those by name.

        Raises:
            RuntimeError: In Trio's thread, in a forked process, or after the device was closed or lost.
            trio.Cancelled: The task that waits for the worker thread is cancelled.
        """
        given = {key: _unwrapped(value) for key, value in kwargs.items()}
        return self._wrapped(
            self._blocking.call(name, partial(run, function, *map(_unwrapped, args), **given))
        )

    def asarray(
        self,
        obj: Any,
        /,
        *,
        dtype: DTypeLike | None = None,
        device: Device | None = None,
        copy: bool | None = None,
    ) -> Array:
        """Make an array of numbers, nested sequences of them, or an array of this or another library.

        Raises:
            ValueError: `copy` is False, and the elements are not on the device.
            TypeError: Elements that no dtype has, or a complex number for a real dtype.
        """
        given = obj if isinstance(obj, Array) else _host(obj, dtype)
        place = device or (obj.device if isinstance(obj, Array) else self._device)
        return cast("Array", self.call("asarray", arrays.asarray, place, given, dtype=dtype, copy=copy))

    def from_dlpack(self, x: Any, /, *, device: Device | None = None, copy: bool | None = None) -> Array:
        """Make an array of another library's; one of a namespace of this package shares its memory.

        Raises:
            BufferError: `copy` is False, and the array is another library's.
        """
        if not isinstance(x, Array) and copy is False:
            raise BufferError("from_dlpack: copy=False, and the array is not in the memory of the device")
        return self.asarray(x, device=device, copy=copy)

    def broadcast_shapes(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that several broadcast to.

        Raises:
            ValueError: They do not.
        """
        return np.broadcast_shapes(*shapes)

    def _wrapped(self, result: Any) -> Any:
        if isinstance(result, AccelRef):
            return Array(result, self)
        return _each(self._wrapped, result) if _is_several(result) else result


def array_api(device: Device) -> ArrayApi:
    """Make a namespace of the Python array API standard whose arrays are on a device.

    For code that is written against the standard, in worker threads: a call blocks its thread until the
    device has the result. SciPy and scikit-learn are such code in part. `ta.arrays` has the same functions
    for programs that await.

    Errors of a call, in the thread that makes it, besides those of the function itself:

    * `RuntimeError`: it is made in Trio's thread, where it would block the loop; after the device was closed
      or lost (the cause is the `DeviceLostError`); in a forked process.
    * `NotSupportedError`: a function that is not there, or not for this dtype or backend.
    * `trio.Cancelled`: the task that waits for the worker thread is cancelled.

    Threads that the program starts itself may call it too; nothing cancels them.

    Args:
        device: An open device of the Trio run that this is called in, or of the run whose worker thread this
            is called in.

    Raises:
        RuntimeError: Called outside of a Trio run and its worker threads.
    """
    return ArrayApi(device)


def _unwrapped(argument: Any) -> Any:
    if isinstance(argument, Array):
        return argument.ref
    # By the standard they are what Python's numbers are, and have no dtype.
    if _is_number(argument):
        return argument.item()
    if _is_slice(argument):
        # Bounds that are arrays are waited for here, before the call.
        bounds = (argument.start, argument.stop, argument.step)
        return slice(*(operator.index(bound) if isinstance(bound, Array) else bound for bound in bounds))
    return _each(_unwrapped, argument) if _is_several(argument) else argument


def _is_number(argument: object) -> bool:
    return isinstance(argument, np.generic)


def _is_slice(argument: object) -> bool:
    return isinstance(argument, slice)


def _is_several(value: object) -> bool:
    return isinstance(value, (tuple, list))


def _each(change: Callable[[Any], Any], several: Any) -> Any:
    changed = map(change, several)
    # Results that have names are made of arguments by their places; the others are tuples in the standard.
    return type(several)(*changed) if hasattr(several, "_fields") else tuple(changed)


def _host(obj: Any, dtype: DTypeLike | None) -> Any:
    """Make a host array of what is no array of a device; that of another GPU library stays as it is."""
    if hasattr(obj, "__dlpack__") and not _is_numpys(obj):
        return np.from_dlpack(obj) if int(obj.__dlpack_device__()[0]) in _HOST else obj
    host = host_array("asarray: obj", obj)
    if host.dtype.kind in "OSUMm" or host.dtype.names:
        raise TypeError(f"asarray: obj: {host.dtype} is no element type of a device")
    if dtype is None or host.dtype == DType.of(dtype):
        return host
    if host.dtype.kind == "c" and DType.of(dtype).kind != "complex":
        raise TypeError(f"asarray: complex numbers do not become {DType.of(dtype)}")
    # From what was given, so that numbers that the dtype does not hold are refused.
    return np.asarray(obj, DType.of(dtype).dtype)


def _is_numpys(obj: object) -> bool:
    return isinstance(obj, (np.ndarray, np.generic))
