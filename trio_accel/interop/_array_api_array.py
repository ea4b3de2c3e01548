"""The arrays of the blocking namespace: operators, any indexing, conversion of one element, DLPack."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeAlias, cast

import attrs
import numpy as np
import numpy.typing as npt
import trio

from .. import arrays
from ..backends.base import DType, NotSupportedError
from ..devices import AccelRef, Call, Device
from ._numpy_names import of_function, of_ufunc

_HOST = (1, 0)
"""DLPack's name for host memory."""
_SHOWN = 1000
"""The number of elements up to which the `repr` of an array has them."""
_REAL = ("bool", "int", "uint", "float")
"""Kinds of the dtypes that Python converts to a real number."""
_GRADIENT = "write b.get(ta.grad(loss)(array)), where loss is a function that composes calls"
_INSTEAD = {
    **dict.fromkeys(("backward", "grad", "requires_grad", "requires_grad_"), _GRADIENT),
    "detach": "leave it out, because nothing is recorded outside of ta.grad",
    "block_until_ready": "leave it out, because each operation has ended when it returns",
    "item": "write float(array), int(array) or complex(array)",
    **dict.fromkeys(("cpu", "get", "numpy", "to_host"), "write np.asarray(array), or b.get(array)"),
    **dict.fromkeys(("cuda", "to"), 'write array.to_device(device), or xp.astype(array, "float32")'),
    **dict.fromkeys(("clone", "copy"), "write xp.asarray(array, copy=True)"),
    **dict.fromkeys(("at", "assign", "fill"), "write array[index] = value"),
    **dict.fromkeys(("flatten", "ravel", "view"), "write xp.reshape(array, (-1,))"),
    **dict.fromkeys(("permute", "transpose"), "write xp.permute_dims(array, axes)"),
    **dict.fromkeys(("double", "float", "half", "long", "cast"), 'write xp.astype(array, "float32")'),
    **dict.fromkeys(("dot", "mm"), "write array @ other"),
    "unsqueeze": "write xp.expand_dims(array, axis=0)",
    "dim": "write array.ndim",
    "numel": "write array.size",
}
"""Attributes of other libraries' arrays: the advice, where the namespace lacks a function of the name."""
# A call that was run is one of its class `spent`.
_OPERANDS = (bool, int, float, complex, np.generic, np.ndarray, AccelRef, Call.spent)


class Space(Protocol):
    """The namespace of arrays, as they need it."""

    def __getattr__(self, name: str) -> Any:
        """Return a function of the namespace."""
        ...

    def call(self, name: str, function: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
        """Call a function of `AccelRef`s in the run of the device, and wait for it."""
        ...


_Binary: TypeAlias = "Callable[[Array, Any], Array]"
_Unary: TypeAlias = "Callable[[Array], Array]"


def _binary(name: str, *, is_reflected: bool = False) -> _Binary:
    """Make the operator of a function; a reflected one has the array on the right."""

    def method(self: Array, operand: Any, /) -> Any:
        if not isinstance(operand, (Array, *_OPERANDS)):
            return NotImplemented
        function = getattr(self.__array_namespace__(), name)
        return function(operand, self) if is_reflected else function(self, operand)

    return method


def _in_place(name: str) -> _Binary:
    """Make the operator that changes the array."""

    async def change(function: Callable[..., Any], x: AccelRef, operand: Any) -> None:
        result = function(x, operand)
        if result.dtype is not x.dtype or result.shape != x.shape:
            result.close()
            raise TypeError(
                f"{name} in place: the result has dtype {result.dtype} and shape {result.shape}, which the "
                f"array of {x.dtype} and shape {x.shape} cannot take on"
            )
        await x.assign(result)

    def method(self: Array, operand: Any, /) -> Any:
        if not isinstance(operand, (Array, *_OPERANDS)):
            return NotImplemented
        space = self.__array_namespace__()
        # The blocking function wraps one that makes a call, which is a part of the request.
        space.call(name, change, getattr(space, name).__wrapped__, self, operand)
        return self

    return method


def _operators(name: str) -> tuple[_Binary, _Binary, _Binary]:
    """Make the three operators of a function: with the array on the left, with it on the right, in place."""
    return _binary(name), _binary(name, is_reflected=True), _in_place(name)


def _unary(name: str) -> _Unary:
    def method(self: Array, /) -> Any:
        return getattr(self.__array_namespace__(), name)(self)

    return method


class Array:
    """An array of the blocking namespace `array_api`, by the Python array API standard 2025.12.

    Its elements are in device memory, and each operation waits for the device in the calling thread. In
    Trio's thread it raises `RuntimeError`. Indexing by integers, slices, ``...`` and ``None`` makes a view of
    the same memory; indexing by arrays makes a copy. The operators take arrays, NumPy arrays and Python
    numbers, and promote by the standard. The `repr` of an array with up to 1000 elements waits for them, but
    not in Trio's thread.

    Attributes:
        what_to_do: The advice in errors of async functions, which take `ref`.
    """

    __slots__ = ("__weakref__", "_ref", "_space")
    what_to_do: ClassVar[str] = (
        "call the function of its namespace, such as b.xp.sum(array), or pass its AccelRef: array.ref"
    )
    # References and calls leave operators to the array.
    takes_operators: ClassVar[bool] = True
    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # arrays are compared by element

    def __init__(self, ref: AccelRef, space: Space) -> None:
        self._ref = ref
        self._space = space

    def __array_ufunc__(self, ufunc: Any, method: str, /, *inputs: Any, **named: Any) -> Any:
        """Compute a ufunc of NumPy, and operators with NumPy's arrays and numbers.

        The namespace computes it on the device if it has the function, otherwise NumPy on the host.
        """
        return of_ufunc(self._space, ufunc, method, inputs, named)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any, /) -> Any:
        """Compute a function of NumPy: on the device if the namespace has it, otherwise on the host."""
        return of_function(self._space, function, args, kwargs)

    def __array_namespace__(self, /, *, api_version: str | None = None) -> Any:
        """Return the namespace.

        Raises:
            ValueError: This version of the standard is not supported.
        """
        self._space.check_version(api_version)
        return self._space

    if not TYPE_CHECKING:  # a type checker would find every attribute

        def __getattr__(self, name: str) -> NoReturn:
            advice = _INSTEAD.get(name, "np.asarray(array) copies it to NumPy")
            if not name.startswith("_") and hasattr(self._space, name):
                advice = f"write xp.{name}(array), where xp is its namespace, such as b.xp"
            message = f"'Array' object does not have {name!r}; {advice}"
            raise AttributeError(message, name=name, obj=self)

    def __dir__(self) -> list[str]:
        """Return the names for programs, without those that only this package uses."""
        names = [name for name in super().__dir__() if name not in ("takes_operators", "what_to_do")]
        return [name for name in names if name[0] != "_" or name.endswith("__")]

    def __repr__(self) -> str:
        host = self._shown_elements() if self.size <= _SHOWN and not trio.lowlevel.in_trio_run() else None
        if host is not None:
            numbers = np.array2string(host, separator=", ", prefix="Array(")
            return f"Array({numbers}, dtype={self.dtype}, device={self._ref.device.path})"
        return f"<Array {self.dtype} {self.shape} on {self._ref.device.path}>"

    def _shown_elements(self) -> npt.NDArray[Any] | None:
        """Copy the elements for the `repr`; None if the array is lost or damaged, or its device is closed."""

        async def elements() -> npt.NDArray[Any] | None:
            # Only errors of the task are suppressed: a handler of a signal raises its error in this thread.
            with suppress(Exception):
                return await self._ref.to_host()
            return None

        try:
            return cast("npt.NDArray[Any] | None", self._space.call("__repr__", elements))
        except trio.RunFinishedError:
            return None
        except RuntimeError as error:
            if str(error).startswith("__repr__: "):  # the namespace refuses the call
                return None
            raise

    @property
    def ref(self) -> AccelRef:
        """The array, as the async functions take it."""
        return self._ref

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self._ref.dtype

    @property
    def device(self) -> Device:
        """The device of its memory."""
        return self._ref.device

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return self._ref.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._ref.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._ref.size

    @property
    def T(self) -> Array:  # noqa: N802  # the standard's name
        """A view with the two axes exchanged.

        Raises:
            ValueError: It has not two axes.
        """
        if self.ndim != 2:
            raise ValueError(f"T: the array must have two axes, got shape {self.shape}; see mT, permute_dims")
        return self.mT

    @property
    def mT(self) -> Array:  # noqa: N802  # the standard's name
        """A view with the last two axes exchanged.

        Raises:
            ValueError: It has fewer than two axes.
        """
        return cast("Array", self._space.matrix_transpose(self))

    def to_device(self, device: Device, /, *, stream: None = None) -> Array:
        """Copy the array to another device; on its own, it is returned as it is.

        Raises:
            ValueError: A stream is given, or it is not a device.
        """
        if stream is not None:
            raise ValueError("to_device: stream must be None: operations are ordered by their arrays")
        return cast("Array", self._space.asarray(self, device=device))

    __add__, __radd__, __iadd__ = _operators("add")
    __sub__, __rsub__, __isub__ = _operators("subtract")
    __mul__, __rmul__, __imul__ = _operators("multiply")
    __truediv__, __rtruediv__, __itruediv__ = _operators("divide")
    __floordiv__, __rfloordiv__, __ifloordiv__ = _operators("floor_divide")
    __mod__, __rmod__, __imod__ = _operators("remainder")
    __pow__, __rpow__, __ipow__ = _operators("pow")
    __matmul__, __rmatmul__, __imatmul__ = _operators("matmul")
    __and__, __rand__, __iand__ = _operators("bitwise_and")
    __or__, __ror__, __ior__ = _operators("bitwise_or")
    __xor__, __rxor__, __ixor__ = _operators("bitwise_xor")
    __lshift__, __rlshift__, __ilshift__ = _operators("bitwise_left_shift")
    __rshift__, __rrshift__, __irshift__ = _operators("bitwise_right_shift")
    __eq__: ClassVar[_Binary] = _binary("equal")  # type: ignore[assignment]  # element by element
    __ne__: ClassVar[_Binary] = _binary("not_equal")  # type: ignore[assignment]
    __lt__: ClassVar[_Binary] = _binary("less")
    __le__: ClassVar[_Binary] = _binary("less_equal")
    __gt__: ClassVar[_Binary] = _binary("greater")
    __ge__: ClassVar[_Binary] = _binary("greater_equal")
    __neg__: ClassVar[_Unary] = _unary("negative")
    __pos__: ClassVar[_Unary] = _unary("positive")
    __abs__: ClassVar[_Unary] = _unary("abs")
    __invert__: ClassVar[_Unary] = _unary("bitwise_invert")

    def __getitem__(self, key: Any, /) -> Array:
        """Take a part: a view by integers, slices, ``...`` and ``None``; a copy by arrays.

        Arrays of integers, also of NumPy, and lists select elements along their axes, broadcast against each
        other, and arrays of truth values select the places that are true.

        Raises:
            IndexError: An index is out of range, there are too many, or an array of truth values has another
                shape.
            TypeError: An index is of another kind.
        """
        return cast("Array", self._space.call("__getitem__", get_part, self, self._with_arrays(key)))

    def __setitem__(self, key: Any, value: Any, /) -> None:
        """Write to a part, which is chosen as by indexing; the value is broadcast to it.

        Raises:
            IndexError, TypeError: As for indexing; or the dtype lacks the kind of the value.
            ValueError: The value does not broadcast to the shape of the part.
        """
        self._space.call("__setitem__", set_part, self, self._with_arrays(key), value)

    def _with_arrays(self, key: Any) -> Any:
        """Copy NumPy arrays and lists in a key to the device."""
        if isinstance(key, tuple):
            return tuple([self._with_arrays(item) for item in cast("tuple[object, ...]", key)])
        if isinstance(key, list):
            host = np.asarray(cast("list[object]", key))
            key = host if host.size else host.astype(np.int64)
        return self._space.asarray(key) if isinstance(key, np.ndarray) else key

    def __len__(self) -> int:
        return len(self._ref)

    def __iter__(self) -> Iterator[Array]:
        # Raise for a 0-d array at once, and not when the first element is taken.
        return map(self.__getitem__, range(len(self._ref)))

    def _item(self, name: str, kinds: tuple[str, ...]) -> Any:
        if self.size != 1 or self.dtype.kind not in kinds:
            raise TypeError(
                f"{name}: the array must be a single element of kind {' or '.join(kinds)}, got shape "
                f"{self.shape} and dtype {self.dtype}"
            )
        return self._space.call(name, self._ref.item)

    def __bool__(self) -> bool:
        return bool(self._item("__bool__", (*_REAL, "complex")))

    def __int__(self) -> int:
        return int(self._item("__int__", _REAL))

    def __float__(self) -> float:
        return float(self._item("__float__", _REAL))

    def __complex__(self) -> complex:
        return complex(self._item("__complex__", (*_REAL, "complex")))

    def __index__(self) -> int:
        return operator.index(self._item("__index__", ("int", "uint")))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Copy the array to the host, for `numpy.asarray`.

        Raises:
            ValueError: `copy` is False.
        """
        if copy is False:
            raise ValueError("copy: the array is in the memory of a device, so it is copied to the host")
        host: npt.NDArray[Any] = self._space.call("__array__", self._ref.to_host)
        return host if dtype is None else host.astype(dtype, copy=False)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return where `__dlpack__` has the array: at its place, or on the host for a worker's array."""
        return cast(
            "tuple[int, int]", self._space.call("__dlpack_device__", partial(_dlpack_device, self._ref))
        )

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Export the array: over the same memory where this process addresses it, else as a copy on the host.

        Calls of the namespace that change the array are seen there, and the other way round. Memory of a GPU
        must not be used after the device was closed.

        Args:
            stream: Stream of the consumer; not used, because all earlier work is done.
            max_version: The newest DLPack version that the consumer knows.
            dl_device: The device that the consumer requests: the array's own, or the host.
            copy: Whether it must be a copy; None to copy only if necessary.

        Raises:
            BufferError: It cannot be had so.
        """
        export = partial(_export, self._ref, max_version=max_version, dl_device=dl_device, copy=copy)
        return self._space.call("__dlpack__", export)


async def _dlpack_device(ref: AccelRef) -> tuple[int, int]:
    try:
        async with ref.lease() as array:
            kind, index = array.__dlpack_device__()
            return int(kind), int(index)
    except NotSupportedError:
        return _HOST


async def _export(
    ref: AccelRef,
    *,
    max_version: tuple[int, int] | None,
    dl_device: tuple[int, int] | None,
    copy: bool | None,
) -> object:
    location = await _dlpack_device(ref)
    if dl_device not in (None, location, _HOST):
        raise BufferError(f"dl_device: the array is on {location}, and can be copied to the host, {_HOST}")
    if not copy and dl_device in (None, location):
        try:
            # The lease is for writing, because the oldest versions of DLPack cannot mark an array as
            # read-only.
            async with ref.lease(write=True) as array:
                # The capsule has the object, and with it the memory, also after a `release`.
                return cast("object", array.__dlpack__(max_version=max_version))
        except NotSupportedError:
            pass
    if copy is False:
        raise BufferError("copy: the memory of this array is not addressed there, so it has to be copied")
    if dl_device is None and location != _HOST:
        return await _export(await ref.copy(), max_version=max_version, dl_device=location, copy=False)
    host = await ref.to_host()
    return host.__dlpack__(max_version=max_version)


# Functions are looked up by name, because this module is imported before them.
_arrays: Any = arrays
_Key: TypeAlias = Any


async def get_part(x: AccelRef, key: _Key) -> AccelRef:
    """Return the part of an array that a key chooses; see `Array.__getitem__`."""
    if _is_one_truth(key):
        # The standard has an array of truth values choose a copy with one more axis.
        return await x[None][: int(await number_of(key))].copy()
    parts = await _without_masks(x, key)
    if not any(isinstance(part, AccelRef) for part in parts):
        return x[tuple(parts)]
    chosen = _Chosen.of(x, parts)
    result = await arrays.gather_nd(chosen.view, chosen.indices)
    return _moved(result, 0, chosen.ndim, chosen.first)


async def set_part(x: AccelRef, key: _Key, value: Any) -> None:
    """Write to the part of an array that a key chooses; see `Array.__setitem__`."""
    if _is_mask(key) and (not getattr(value, "shape", ()) or not getattr(key, "shape", ())):
        await _set_where(x, key, value)
        return
    parts = await _without_masks(x, key)
    if not any(isinstance(part, AccelRef) for part in parts):
        await x[tuple(parts)].assign(value)
        return
    chosen = _Chosen.of(x, parts)
    if getattr(value, "ndim", 0) > chosen.view.ndim - len(chosen.indices) - chosen.first:
        # If it has some of the moved axes, it has all of them.
        value = _moved(arrays.broadcast_to(value, chosen.shape), chosen.first, chosen.ndim, 0)
    await arrays.scatter_nd(chosen.view, chosen.indices, value)


@attrs.frozen(eq=False)
class _Chosen:
    """The part of an array that arrays of integers choose.

    Attributes:
        view: The array, with the axes first that they are for.
        indices: An array for each of these axes.
        ndim: How many axes they broadcast to.
        first: Before which of the other axes these are in the result.
        shape: The shape of the result.
    """

    view: AccelRef
    indices: tuple[Any, ...]
    ndim: int
    first: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: AccelRef, parts: Sequence[Any]) -> _Chosen:
        is_index = [not (part is None or isinstance(part, slice)) for part in parts]
        view = x[tuple(slice(None) if chosen else part for part, chosen in zip(parts, is_index, strict=True))]
        is_index += [False] * (view.ndim - len(parts))
        axes = [axis for axis, chosen in enumerate(is_index) if chosen]
        other_axes = [axis for axis, chosen in enumerate(is_index) if not chosen]
        indices = tuple(
            part if isinstance(part, AccelRef) else np.asarray(part)
            for part, chosen in zip(parts, is_index, strict=False)
            if chosen
        )
        try:
            shape = np.broadcast_shapes(*(index.shape for index in indices))
        except ValueError:
            shapes = ", ".join(str(index.shape) for index in indices)
            raise IndexError(f"index: the shapes {shapes} of the indices do not broadcast to one") from None
        # NumPy puts the axes in the place of the indices if these are adjacent, else in front.
        first = axes[0] if axes[-1] - axes[0] == len(axes) - 1 else 0
        view = view.transpose((*axes, *other_axes))
        rest = view.shape[len(axes) :]
        return cls(view, indices, len(shape), first, (*rest[:first], *shape, *rest[first:]))


async def _set_where(x: AccelRef, mask: _Key, value: Any) -> None:
    if _is_one_truth(mask):
        if await number_of(mask):
            await x[None].assign(value)
        return
    _check_mask(x, mask, 0)
    if mask.size:
        condition = mask.reshape((*mask.shape, *(1,) * (x.ndim - mask.ndim)))
        await x.assign(_arrays.where(condition, value, x))


async def _without_masks(x: AccelRef, key: _Key) -> list[Any]:
    """Return the items of a key, with integers in place of truth values, and slices in place of dots."""
    items: tuple[_Key, ...] = key if _is_several(key) else (key,)
    used = sum(_axes(part) for part in items)
    if used > x.ndim or sum(part is Ellipsis for part in items) > 1:
        raise IndexError(
            f"index: {used} axes are indexed of an array of shape {x.shape}, with at most one ..."
        )
    parts: list[Any] = []
    axis = 0
    for part in items:
        if part is Ellipsis:
            parts += [slice(None)] * (x.ndim - used)
            axis += x.ndim - used
        elif _is_one_truth(part):
            raise IndexError("index: one truth value is an index by itself only")
        elif _is_mask(part):
            _check_mask(x, part, axis)
            parts += await _arrays.nonzero(part)
        elif isinstance(part, AccelRef) and part.dtype.kind not in ("int", "uint"):
            raise IndexError(f"index: arrays must have an integer dtype or bool, got {part.dtype}")
        else:
            is_one = isinstance(part, AccelRef) and not part.shape
            parts.append(operator.index(await part.item()) if is_one else part)
        axis += _axes(part)
    return parts


def _is_several(key: object) -> bool:
    return isinstance(key, tuple)


def _axes(part: _Key) -> int:
    if part is None or part is Ellipsis or _is_one_truth(part):
        return 0
    return part.ndim if _is_mask(part) else 1


def _is_mask(part: _Key) -> bool:
    return isinstance(part, (bool, np.bool)) or (isinstance(part, AccelRef) and part.dtype is DType.bool)


def _is_one_truth(part: _Key) -> bool:
    return _is_mask(part) and not getattr(part, "shape", ())


async def number_of(part: _Key) -> Any:
    """Return the element of a 0-d array, or any other object as it is."""
    return await part.item() if isinstance(part, AccelRef) else part


def _check_mask(x: AccelRef, mask: AccelRef, axis: int) -> None:
    """Require that an array of truth values has the shape of the array that it selects from."""
    of = x.shape[axis : axis + mask.ndim]
    if len(of) < mask.ndim or any(
        extent not in (0, axis_extent) for extent, axis_extent in zip(mask.shape, of, strict=True)
    ):
        raise IndexError(f"index: truth values of shape {mask.shape} do not fit the axes {of} of the array")


def _moved(x: AccelRef, source: int, count: int, to: int) -> AccelRef:
    """Move adjacent axes to another place."""
    axes = list(range(x.ndim))
    moved, other_axes = axes[source : source + count], axes[:source] + axes[source + count :]
    return x.transpose((*other_axes[:to], *moved, *other_axes[to:]))
