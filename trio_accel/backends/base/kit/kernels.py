"""Kernels of a backend: functions that run the operations of one specification class."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, cast

import attrs

from ..contract.device_array import DeviceArray
from ..contract.device_info import DeviceInfo
from ..contract.dtypes import DType, HostArray
from ..contract.errors import NotSupportedError
from ..contract.ops import ArraySpec, OperationSpec, StatusArray
from ..contract.protocols import AccelStream

__all__ = ["DeviceCall", "HostCall", "KernelCall", "KernelDevice", "kernel"]

if TYPE_CHECKING:
    # Python 3.13 has the default; the checkers know it for all.
    from typing_extensions import TypeVar as TypeVarWithDefault

    ArrayT_co = TypeVarWithDefault("ArrayT_co", covariant=True, default=object)
    PlanT_co = TypeVarWithDefault("PlanT_co", covariant=True, default=object)
else:
    ArrayT_co, PlanT_co = TypeVar("ArrayT_co", covariant=True), TypeVar("PlanT_co", covariant=True)

_KERNELS = "_trio_accel_kernels"
# The name of the table for declared kernels in a module or a class.
_TABLE = "__trio_accel_kernels__"

ALLOWED: dict[str, Mapping[str, tuple[DType, ...]]] = {}
"""The dtypes of declared operations, by operation name; each by field name, like `DTypes`."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

DTypes: TypeAlias = Mapping[str, tuple[DType, ...]]
"""By the names of fields that hold arrays, the dtypes that a kernel has; ``""`` for the first such field."""


class KernelDevice(Protocol):
    """The open device, as its kernels see it."""

    @property
    def info(self) -> DeviceInfo:
        """Description of the device."""
        ...


class KernelCall(Protocol[ArrayT_co, PlanT_co]):
    """One launch, as its kernel sees it: ``kernel(spec, call)``.

    A backend that computes where its kernels run gives them arrays: `HostCall`. One that enqueues gives them
    addresses: `DeviceCall`. Memory of the call is its own until the operation is complete.
    """

    @property
    def plan(self) -> PlanT_co:
        """Result of the kernel's `plan` function; None without one."""
        ...

    @property
    def device(self) -> KernelDevice:
        """The open device, described by ``device.info``."""
        ...

    @property
    def stream(self) -> AccelStream:
        """The stream of the operation."""
        ...

    def array(self, array: ArraySpec, *, write: bool = True) -> ArrayT_co:
        """Give an array as the backend's kernels use it: a NumPy array, or its address and strides.

        Args:
            array: The array.
            write: Whether it may be written to. A NumPy array without that cannot be made writable.

        Raises:
            KeyError: No block has this id.
            ValueError: The array is not within it.
        """
        ...

    def address_of(self, array: ArraySpec) -> int:
        """Return the address of an array's first element; raise as `array` does."""
        ...

    def workspace(self, nbytes: int) -> int:
        """Take `nbytes` bytes of memory where the kernel runs, and return the address; 0 for none.

        Raises:
            OutOfMemoryError: There is too little memory.
        """
        ...

    def status(self, words: StatusArray) -> int:
        """Return the address to write status words to, which are zero now."""
        ...


HostCall: TypeAlias = KernelCall[HostArray, PlanT_co]
"""A launch where the kernel computes in the thread of the stream, as on the CPU backend: `array` gives a view
of memory. The parameter is the type of `plan`: ``HostCall[Plan]``."""


class DeviceCall(KernelCall[DeviceArray, PlanT_co], Protocol[PlanT_co]):
    """A launch where the kernel enqueues on the stream, as on CUDA, with the device's context current.

    `array` gives the address and layout. The parameter is the type of `plan`: ``DeviceCall[Plan]``.
    """

    @property
    def handle(self) -> int:
        """The stream, in the form for vendors' libraries."""
        ...

    def packed(self, array: ArraySpec, order: Literal["C", "F"] = "C") -> int:
        """Return the address of an array's elements without gaps: in the array itself, or in a copy."""
        ...

    def result(self, array: ArraySpec, order: Literal["C", "F"] = "C", *, is_updated: bool = False) -> int:
        """Return the address to write an array to, without gaps: in the array itself, or in workspace.

        Workspace is copied to the array after the kernel.

        Args:
            array: The array.
            order: Order of its matrices at that address.
            is_updated: Whether the kernel also reads the contents.
        """
        ...

    def host_workspace(self, nbytes: int) -> int:
        """Take `nbytes` bytes of host memory, and return the address; 0 for none."""
        ...

    def words(self, count: int, judge: Callable[[StatusArray], None]) -> int:
        """Return the address of `count` zeroed status words of the kernel's own, 32 bits each.

        Args:
            count: The number of words.
            judge: Called with the words that the kernel has written, when the operation is complete. Its
                error becomes the error of the operation. It must be short. It may be called in a thread of
                the device.
        """
        ...


def _prepares(kernel: KernelEntry) -> bool:
    return kernel.is_blocking or (kernel.plan is not None and not kernel.is_quick)


@attrs.frozen
class KernelEntry:
    """The kernel of one specification class.

    Attributes:
        operation: Names the class; see `OperationSpec.operation`.
        backend: Name of the backend.
        function: Called as ``function(spec, call)``.
        plan: Called as ``plan(spec, device)``; None where operations have nothing in common.
        dtypes: The dtypes that it has; empty for any.
        is_quick: Whether `plan` takes no longer than a launch, so that it is called in place.
        is_blocking: Whether `function` may take long, so that it is called in a thread.
        location: File and line, for errors.
        bind: Called as ``bind(spec, call)``: makes what computes an operation as often as it is called, on
            the same blocks; None, or a result of None, for `function` itself.
        prepares: Whether there may be anything to do before it is called in place.
    """

    operation: str
    backend: str
    function: Callable[..., object]
    plan: Callable[..., Any] | None = None
    dtypes: DTypes = attrs.field(factory=dict[str, tuple[DType, ...]], hash=False)
    is_quick: bool = False
    is_blocking: bool = False
    location: str = attrs.field(default="", eq=False)
    bind: Callable[..., Callable[[], object] | None] | None = None
    prepares: bool = attrs.field(init=False, default=attrs.Factory(_prepares, takes_self=True))


class _Declared(Protocol):
    """A function as `trio_accel.devices.operation` makes it."""

    @property
    def spec(self) -> type[OperationSpec]: ...


def kernel(
    *operations: type[OperationSpec] | str | _Declared,
    backend: str,
    dtypes: Collection[DType] | Mapping[str, Collection[DType]] | None = None,
    plan: Callable[..., Any] | None = None,
    is_quick: bool = False,
    is_blocking: bool = False,
    bind: Callable[..., Callable[[], object] | None] | None = None,
) -> Callable[[FunctionT], FunctionT]:
    """Declare a function as a kernel; one function may serve several operations and backends.

    The functions of a module are the kernels of the library with the module's import path as its name. A
    kernel is called as ``kernel(spec, call)``, and returns None. If the backend computes in the thread of a
    stream, the kernel computes there; otherwise it enqueues. See the guide, "A new kernel".

    Args:
        operations: The operations: declared functions, specification classes, or values of
            `OperationSpec.operation`.
        backend: Name of the backend, such as ``"cpu"``.
        dtypes: The supported dtypes: of the specification's first array, or by the names of fields. An
            operation with another dtype is refused before the launch.
        plan: Called as ``plan(spec, device)``: makes the common part of operations with equal
            `Descriptor.plan_key`, or refuses them. It may block, because it is called off the event loop. Its
            result, which must not be None, is cached.
        is_quick: Whether `plan` takes no longer than a launch, so that it is called in place.
        is_blocking: Whether the function may wait for the device, or takes long for another reason. If so, it
            is called in a thread, and the event loop continues. For backends without a thread for each
            stream.
        bind: Called as ``bind(spec, call)``, if the backend computes on the host: returns a function that
            runs the operation at each call, with views and addresses made once; or returns None.

    Raises:
        TypeError: The function does not take ``(spec, call)``, or `plan` not ``(spec, device)``.
        ValueError: The operation has a kernel for this backend already, or was declared for other dtypes, or
            there are no dtypes.
    """
    specs = [operation if isinstance(operation, (str, type)) else operation.spec for operation in operations]
    frame = sys._getframe(1)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # where a class or a module is made: only its frame has its names
    decorator_location = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    names = [spec if isinstance(spec, str) else spec.operation for spec in specs]
    allowed = [_checked_dtypes(dtypes, spec, decorator_location) for spec in specs]

    def declare(function: FunctionT) -> FunctionT:
        location = _location_of(function, decorator_location)
        # The body of a class has a qualified name.
        is_method = frame.f_code.co_name != "<module>" and "__qualname__" in frame.f_locals
        _check_signature(function, ("spec", "call"), is_method=is_method, location=location)
        if plan is not None:
            _check_signature(
                plan, ("spec", "device"), is_method=is_method, location=_location_of(plan, decorator_location)
            )
        if bind is not None:
            _check_signature(
                bind, ("spec", "call"), is_method=is_method, location=_location_of(bind, decorator_location)
            )
        for name, has in zip(names, allowed, strict=True):
            entry = KernelEntry(name, backend, function, plan, has, is_quick, is_blocking, location, bind)
            _check_declared(entry)
            if is_method or frame.f_code.co_name == "<module>":
                _enter(entry, frame.f_locals)
            setattr(function, _KERNELS, (*getattr(function, _KERNELS, ()), entry))
        return function

    return declare


def _checked_dtypes(
    dtypes: Collection[DType] | Mapping[str, Collection[DType]] | None,
    operation: type[OperationSpec] | str,
    location: str,
) -> DTypes:
    if dtypes is None:
        return {}
    by_field = cast(
        "Mapping[str, Collection[DType]]", dtypes if isinstance(dtypes, Mapping) else {"": dtypes}
    )
    for field, those in by_field.items():
        if not those:
            raise ValueError(
                f"{location}: dtypes: there are none{field and f' of {field}'}: no operation could run"
            )
        for dtype in those:
            if not isinstance(dtype, DType):  # pyright: ignore[reportUnnecessaryIsInstance]  # by untyped callers
                raise TypeError(f"{location}: dtypes: {dtype!r} is none of the members of DType")
        if field and not isinstance(operation, str):
            arrays = [spec_field.name for spec_field in operation.descriptor().fields if spec_field.is_array]
            if field not in arrays:
                available = ", ".join(arrays)
                raise ValueError(
                    f"{location}: dtypes: {operation.__qualname__} has no array {field!r}; it has {available}"
                )
    return {field: tuple(those) for field, those in by_field.items()}


def _location_of(function: Callable[..., Any], default: str) -> str:
    code = getattr(function, "__code__", None)
    return default if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _check_signature(
    function: Callable[..., Any], names: tuple[str, str], *, is_method: bool, location: str
) -> None:
    """Refuse what cannot be called with two arguments, by file and line."""
    expected = f"({'self, ' if is_method else ''}{', '.join(names)})"
    if not callable(function):
        raise TypeError(f"{location}: a function {expected} is needed, got {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except ValueError:
        # A function of an extension may lack a signature.
        return
    try:
        signature.bind(*([None] * (3 if is_method else 2)))
    except TypeError:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(f"{location}: {name} must take {expected}, it takes {signature}") from None


def _enter(entry: KernelEntry, namespace: dict[str, Any]) -> None:
    """Note a kernel of a module or a class; refuse a second one for the same operation."""
    table: dict[tuple[str, str], KernelEntry] = namespace.setdefault(_TABLE, {})
    key = entry.operation, entry.backend
    existing = table.get(key)
    # The same place again means that a module was loaded again; another file may be a cell of a notebook.
    if existing is not None and existing.location != entry.location and _file(existing) == _file(entry):
        raise ValueError(_two_kernels(existing, entry))
    table[key] = entry


def _file(kernel: KernelEntry) -> str:
    return kernel.location.rpartition(":")[0]


def _two_kernels(first: KernelEntry, second: KernelEntry) -> str:
    return (
        f"{second.location}: {first.operation} has two kernels for backend {first.backend!r}: "
        f"{_name_of(first)} at {first.location}, and {_name_of(second)}"
    )


def kernels_of(names: Mapping[str, Any], backend: str) -> dict[str, KernelEntry]:
    """Return the kernels for a backend in a module or a class, by the names of their operations.

    Raises:
        ValueError: An operation has two kernels, or a kernel has a dtype outside of its operation's
            declaration.
    """
    kernels: dict[str, KernelEntry] = {}
    for declared in _declared(names):
        if declared.backend != backend:
            continue
        # Check again, because backends import no capability, so an operation may have been declared after its
        # kernel.
        _check_declared(declared)
        existing = kernels.setdefault(declared.operation, declared)
        if existing.function is not declared.function:
            raise ValueError(_two_kernels(existing, declared))
    return kernels


def _check_declared(kernel: KernelEntry) -> None:
    """Refuse a kernel that no operation of its declaration could run on, by file and line."""
    for field, declared in ALLOWED.get(kernel.operation, {}).items():
        has = kernel.dtypes.get(field, declared)
        if not set(has) & set(declared):
            raise ValueError(
                f"{kernel.location}: dtypes: {kernel.operation} is declared for "
                f"{', '.join(map(str, declared))}, and {_name_of(kernel)} for backend "
                f"{kernel.backend!r} has {', '.join(map(str, has))}: no operation could run"
            )


def _name_of(kernel: KernelEntry) -> str:
    return getattr(kernel.function, "__qualname__", repr(kernel.function))


def _declared(names: Mapping[str, Any]) -> Iterable[KernelEntry]:
    # Several functions may have had the same name, such as `_`.
    yield from names.get(_TABLE, {}).values()
    # Other kernels are imported; a function may have several names here.
    for function in {id(value): value for value in names.values()}.values():
        declared = getattr(function, _KERNELS, ())
        if isinstance(declared, tuple):
            yield from declared


def load_module_kernels(
    library: str, backend: str, available: Iterable[str], device: str
) -> dict[str, KernelEntry]:
    """Import the module of kernels with a library's name; blocks.

    Args:
        library: Its import path.
        backend: Name of the backend.
        available: Libraries that the backend has, for the error.
        device: Name of the device, for the error.

    Raises:
        NotSupportedError: The module does not exist, or it lacks kernels for this backend.
        ImportError: An import in the module failed.
    """
    try:
        module: ModuleType = importlib.import_module(library)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if library != missing and not library.startswith(f"{missing}."):
            raise
        raise NotSupportedError(
            f"the {backend.upper()} backend has no library {library!r}; it has "
            f"{', '.join(sorted(available))}, and there is no module of this name with kernels",
            backend=backend,
            device=device,
        ) from error
    kernels = kernels_of(vars(module), backend)
    if not kernels:
        raise NotSupportedError(
            f"module {library!r} defines no kernels for backend {backend!r}; "
            f'declare them with @kernel(Spec, backend="{backend}")',
            backend=backend,
            device=device,
        )
    return kernels
