"""A blocking namespace of the Python array API standard, for worker threads.

It has the functions of the packages. Differences to the standard are adapted, and dtypes can be inspected.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import ModuleType
from typing import Any, cast

import numpy as np

from .. import arrays
from ..actors import silence
from ..backends.base import DType, DTypeLike, NotSupportedError, host_array
from ..devices import AccelRef, Call, Device
from ._array_api_array import Array, number_of
from ._array_api_dtypes import (
    DEFAULTS,
    STANDARD,
    FloatInfo,
    IntegerInfo,
    Typed,
    can_cast,
    finfo,
    iinfo,
    isdtype,
    result_type,
)
from ._blocking import DeviceCalls, trim

# Names are looked up when they are called, so that missing ones raise under their names.
_arrays: Any = arrays
_PROMOTED = ("cross", "matmul", "outer", "solve", "tensordot", "vecdot")
"""Functions that take arrays of one dtype, and arrays of two in the standard."""


async def run(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function, and wait for its result if it is async; functions of views are not."""
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def adapted(name: str, function: Callable[..., Any], default: Device) -> Callable[..., Any]:
    """Return a function with arguments adapted to the standard.

    Args:
        name: Its name.
        function: The function. Those that make arrays have the device as their first argument.
        default: The device where none is given.
    """
    if name in _PROMOTED:
        return _promoting(function)
    parameters = list(inspect.signature(function).parameters.values())
    is_like = name.endswith("_like")
    if not is_like and parameters[0].name != "device":
        return function

    async def make(*args: Any, device: Device | None = None, **kwargs: Any) -> AccelRef:
        # A 0-d array is a number here, and None is an omitted keyword.
        numbers = [await number_of(argument) for argument in args[is_like:]]
        options = {key: value for key, value in kwargs.items() if value is not None}
        result: AccelRef = await function(args[0] if is_like else device or default, *numbers, **options)
        return result if device in (None, result.device) else await result.copy_to(device)

    keyword = inspect.Parameter("device", inspect.Parameter.KEYWORD_ONLY, default=None)
    named: Any = functools.update_wrapper(make, function)
    named.__signature__ = inspect.Signature([*parameters[not is_like :], keyword])
    return make


def _promoting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def promote(x1: AccelRef, x2: AccelRef, /, **options: Any) -> Any:
        dtype = result_type(x1, x2)
        return function(_converted(x1, dtype), _converted(x2, dtype), **options)

    return promote


def _converted(x: AccelRef | complex, dtype: DType) -> Any:
    """Return an operand of a dtype: an array, the call of its cast, or a host array of a number."""
    if isinstance(x, AccelRef):
        return x if x.dtype is dtype else x.cast(dtype)
    return np.asarray(x, dtype.dtype)


@functools.cache  # calls of one function have a kept plan
def _membership(invert: bool) -> Any:
    from .. import jit

    text, reduce = ("x != among", "all") if invert else ("x == among", "any")
    return jit.reduction(text, reduce, inputs=("x", "among"))


class Functions:
    """Functions on a device: the functions of the namespace itself.

    Args:
        device: The device of new arrays, unless another one is given.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    async def astype(
        self, x: AccelRef, dtype: DTypeLike, /, *, copy: bool = True, device: Device | None = None
    ) -> AccelRef:
        """Convert the elements; a copy unless nothing is to be converted and `copy` is False."""
        if device not in (None, x.device):
            x, copy = await x.copy_to(device), False
        return x if not copy and DType.of(dtype) is x.dtype else await x.cast(dtype)

    async def repeat(self, x: AccelRef, repeats: int | AccelRef, /, *, axis: int | None = None) -> AccelRef:
        """Repeat each element; an array of `repeats` is read on the host."""
        if not isinstance(repeats, AccelRef):
            return await arrays.repeat(x, repeats, axis=axis)
        flat: Any = x if axis is not None else arrays.reshape(x, (-1,))
        length: int = flat.shape[axis or 0]
        indices = np.repeat(np.arange(length), np.broadcast_to(await repeats.to_host(), length))
        return await arrays.take(flat, indices, axis=axis or 0)

    async def searchsorted(
        self, x1: AccelRef, x2: AccelRef | complex, /, *, side: str = "left", sorter: AccelRef | None = None
    ) -> AccelRef:
        """Find places for `x2`, which may be a number, in the sorted `x1`."""
        values = x2 if isinstance(x2, AccelRef) else _converted(x2, result_type(x1, x2))
        positions: AccelRef = await _arrays.searchsorted(x1, values, side=side, sorter=sorter)
        return positions

    async def isin(
        self, x1: AccelRef | complex, x2: AccelRef | complex, /, *, invert: bool = False
    ) -> AccelRef:
        """Return for each element of `x1` whether `x2` contains it; with `invert`, whether it does not."""
        dtype = result_type(x1, x2)
        x, among = _converted(x1, dtype), _converted(x2, dtype)
        result: AccelRef = await _membership(invert)(x[..., None], among.reshape((-1,)), axis=-1)
        return result


_VERSION = "2025.12"
_VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", _VERSION)
# They are NumPy's, not the standard's: other libraries look for them, and call them like NumPy's.
_NUMPYS = ("bincount", "compress", "histogram", "pad", "put", "put_along_axis", "split")
_HOST = (1, 3)
"""Kinds of memory that the host addresses, in DLPack: its own, and such that is pinned."""


class _MissingFunctionError(NotSupportedError, AttributeError):
    """A function that the namespace has not; an `AttributeError`, as `hasattr` wants it."""


class _BlockingNamespace:
    """A namespace of functions that block.

    Args:
        name: Its name.
        device: The device of new arrays.
        call: Calls an async function, and waits for it.
        adapters: Has functions with the standard's signature that differs from the packages'.
        packages: Have the other functions, looked up in this order.
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
        # Class names belong to messages and actors.
        is_function = name[0].islower() and name not in _NUMPYS
        function = getattr(self._adapters, name, None) if is_function else None
        for package in self._packages if is_function else ():
            if function is None and name in package.__all__:
                function = adapted(name, getattr(package, name), self._device)
        if function is None:
            raise _MissingFunctionError(f"{self.__name__}.{name} is not there")

        @wraps(function)
        def blocking(*args: Any, **kwargs: Any) -> Any:
            try:
                return self._call(f"{self.__name__}.{name}", function, *args, **kwargs)
            except BaseException as error:
                trim(error)
                raise

        # A function is the same one whenever it is asked for.
        setattr(self, name, blocking)
        return blocking

    def __dir__(self) -> list[str]:
        """Return the names, including those of the functions."""
        names = {name for package in self._packages for name in package.__all__ if name[0].islower()}
        return sorted({*super().__dir__(), *dir(self._adapters), *names}.difference(_NUMPYS))


class _Info:
    """The capabilities of the namespace; see `ArrayApi.__array_namespace_info__`."""

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
        """Return the dtypes of arrays made without a dtype."""
        return dict(DEFAULTS)

    def dtypes(
        self, *, device: Device | None = None, kind: str | tuple[str, ...] | None = None
    ) -> dict[str, DType]:
        """Return the dtypes of the standard, or the dtypes of a kind."""
        return {dtype.value: dtype for dtype in STANDARD if kind is None or isdtype(dtype, kind)}


class ArrayApi(_BlockingNamespace):
    """A namespace of the Python array API standard on a device; made by `array_api`.

    Its functions are those of `ta.arrays`, and of the extensions `linalg` and `fft`, which are `ta.linalg`
    and `ta.fft`. They block the calling thread until the device has the result, and take and return `Array`.
    Python numbers are promoted by the standard. A missing function raises `NotSupportedError`, which is also
    an `AttributeError`.

    Attributes:
        linalg: The extension for linear algebra.
        fft: The extension for Fourier transforms.
        array_type: The class of its arrays.
    """

    array_type: type[Array] = Array
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
        from .. import fft, linalg

        self._blocking = DeviceCalls(
            device, maker="array_api", owner="namespace", instead="await ta.arrays.{}(...)"
        )
        functions = Functions(device)
        super().__init__("trio_accel.interop.array_api", device, self.call, functions, (arrays, linalg))
        self.linalg: _BlockingNamespace = _BlockingNamespace(
            "linalg", device, self.call, None, (linalg, arrays)
        )
        self.fft: _BlockingNamespace = _BlockingNamespace("fft", device, self.call, None, (fft,))

    def __getattr__(self, name: str) -> Any:
        """Return a dtype, or a function that blocks.

        Raises:
            NotSupportedError: It is not there.
        """
        return DType.__members__.get(name) or super().__getattr__(name)

    # SciPy and scikit-learn compare the namespaces of their arrays.
    def __eq__(self, value: object) -> bool:
        return self._device is value._device if isinstance(value, ArrayApi) else NotImplemented

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
            name: The name that the program calls, for errors.
            function: The function. It gets and returns `AccelRef` where the program has `Array`.
            *args: Its positional arguments.
            **kwargs: Its arguments by name.

        Raises:
            RuntimeError: In Trio's thread, in a forked process, or after the device was closed or lost.
            trio.Cancelled: The task that waits for the worker thread is cancelled.
        """
        keywords = {key: _unwrapped(value) for key, value in kwargs.items()}
        try:
            return self._wrapped(
                self._blocking.call(name, partial(run, function, *map(_unwrapped, args), **keywords))
            )
        except BaseException as error:
            trim(error)
            raise

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

        An array of a device in the same Trio run stays on its device unless `device` is given. The array of
        another run, such as of another `blocking`, is copied by the host to this namespace's device. An
        `AccelRef`, or a call, becomes an array of this namespace's device.

        Raises:
            ValueError: `copy` is False, and the elements are not on the device.
            TypeError: Elements that no dtype has, or a complex number for a real dtype.
            RuntimeError: An `AccelRef` or a call belongs to another Trio run.
        """
        if copy is False and isinstance(obj, Call):
            silence(obj)
            raise ValueError("asarray: copy=False, and the call makes a new array; leave copy out")
        if isinstance(obj, Array) and obj.__array_namespace__()._blocking.run is not self._blocking.run:  # noqa: SLF001
            obj = np.asarray(obj)
        elements = obj if isinstance(obj, Array) or hasattr(obj, "to_host") else _host(obj, dtype)
        target = device or (obj.device if isinstance(obj, Array) else self._device)
        return cast("Array", self.call("asarray", arrays.asarray, target, elements, dtype=dtype, copy=copy))

    def from_dlpack(self, x: Any, /, *, device: Device | None = None, copy: bool | None = None) -> Array:
        """Make an array from another library's; an array of this package's namespaces shares its memory.

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
        return _map_items(self._wrapped, result) if _is_several(result) else result


def array_api(device: Device) -> ArrayApi:
    """Make a namespace of the Python array API standard with arrays on a device.

    It is for code written against the standard, in worker threads: a call blocks its thread until the device
    has the result. SciPy and scikit-learn are partly such code. `ta.arrays` has the same functions for
    programs that await.

    In addition to the errors of the function itself, a call raises, in its thread:

    * `RuntimeError`: it is made in Trio's thread, where it would block the loop; after the device was closed
      or lost (the cause is the `DeviceLostError`); in a forked process.
    * `NotSupportedError`: the function does not exist, or not for this dtype or backend.
    * `trio.Cancelled`: the task that waits for the worker thread is cancelled.

    Threads that the program starts itself may call it too; nothing cancels them.

    Args:
        device: An open device of the current Trio run, or of the run of the current worker thread.

    Raises:
        RuntimeError: Called outside of a Trio run and its worker threads.
    """
    return ArrayApi(device)


def _unwrapped(argument: Any) -> Any:
    match argument:
        case Array():
            return argument.ref
        case np.generic():
            # The standard makes them what Python's numbers are, without a dtype.
            return cast("Any", argument).item()
        case slice():
            # Arrays given as bounds are awaited here, before the call.
            index_slice = cast("Any", argument)
            bounds = [index_slice.start, index_slice.stop, index_slice.step]
            return slice(*[operator.index(bound) if isinstance(bound, Array) else bound for bound in bounds])
        case _:
            pass
    return _map_items(_unwrapped, argument) if _is_several(argument) else argument


def _is_several(value: object) -> bool:
    return isinstance(value, (tuple, list))


def _map_items(change: Callable[[Any], Any], several: Any) -> Any:
    changed = map(change, several)
    # Named results take positional arguments; other results are tuples in the standard.
    return type(several)(*changed) if hasattr(several, "_fields") else tuple(changed)


def _host(obj: Any, dtype: DTypeLike | None) -> Any:
    """Make a host array from a value that is not a device array; another GPU library's array is kept."""
    if hasattr(obj, "__dlpack__") and not isinstance(obj, (np.ndarray, np.generic)):
        return np.from_dlpack(obj) if int(obj.__dlpack_device__()[0]) in _HOST else obj
    host = host_array("asarray: obj", obj)
    if host.dtype.kind in "OSUMm" or host.dtype.names:
        raise TypeError(f"asarray: obj: {host.dtype} is not an element type of a device")
    if dtype is None or host.dtype == DType.of(dtype):
        return host
    if host.dtype.kind == "c" and DType.of(dtype).kind != "complex":
        raise TypeError(f"asarray: complex numbers do not become {DType.of(dtype)}")
    # The array is made from the given value, so that numbers that the dtype cannot hold are refused.
    return np.asarray(obj, DType.of(dtype).dtype)
