"""Kernels of a backend: functions that run the operations of one specification class."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeVar

import attrs

from .errors import NotSupportedError
from .ops import OperationSpec

__all__ = ["Kernel", "kernel", "kernels_of", "load_module_kernels"]

_KERNELS = "_trio_accel_kernels"

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def _prepares(kernel: Kernel) -> bool:
    return kernel.is_blocking or (kernel.plan is not None and not kernel.is_quick)


@attrs.frozen
class Kernel:
    """What runs the operations of one specification class.

    Attributes:
        spec: The class.
        backend: Name of the backend.
        function: Enqueues or prepares an operation, as the backend says.
        plan: Makes what operations of one plan key have in common; None where there is nothing of the kind.
        is_quick: Whether `plan` takes no longer than a launch, so that it is called in place.
        is_blocking: Whether `function` may take long, so that it is called in a thread.
        prepares: Whether there may be anything to do before it is called in place.
    """

    spec: type[OperationSpec]
    backend: str
    function: Callable[..., Any]
    plan: Callable[..., Any] | None = None
    is_quick: bool = False
    is_blocking: bool = False
    prepares: bool = attrs.field(init=False, default=attrs.Factory(_prepares, takes_self=True))


def kernel(
    spec: type[OperationSpec] | str,
    *,
    backend: str,
    plan: Callable[..., Any] | None = None,
    is_quick: bool = False,
    is_blocking: bool = False,
) -> Callable[[FunctionT], FunctionT]:
    """Declare a function as a kernel; a function may be one for several classes and backends.

    The functions of a module are the kernels of the library that has the module's import path as its name.
    What a function is called with is said by the backend: see the guide, "A new kernel".

    Args:
        spec: Specification class that it runs.
        backend: Name of the backend, such as ``"cpu"``.
        plan: Makes what operations with equal `Descriptor.plan_key` have in common. It may block; it is
            called off the event loop, and its result, which is not None, is kept. For backends that say so.
        is_quick: Whether `plan` takes no longer than a launch: then it is called in place.
        is_blocking: Whether the function may wait for the device, or takes long for another reason: then it
            is called in a thread, and the event loop goes on. For backends that say so.
    """

    def declare(function: FunctionT) -> FunctionT:
        declared = getattr(function, _KERNELS, ())
        key = spec if isinstance(spec, str) else spec.operation
        setattr(function, _KERNELS, (*declared, Kernel(key, backend, function, plan, is_quick, is_blocking)))
        return function

    return declare


def kernels_of(names: Mapping[str, Any], backend: str) -> dict[type[OperationSpec], Kernel]:
    """The kernels for a backend among the values of a module or a class.

    Raises:
        ValueError: A specification class has two.
    """
    found: dict[type[OperationSpec], Kernel] = {}
    for declared in _declared(names.values()):
        if declared.backend != backend:
            continue
        other = found.setdefault(declared.spec, declared)
        if other is not declared:
            raise ValueError(
                f"{declared.spec} has two kernels for backend {backend!r}: "
                f"{_name_of(other)} and {_name_of(declared)}"
            )
    return found


def _name_of(kernel: Kernel) -> str:
    return getattr(kernel.function, "__qualname__", repr(kernel.function))


def _declared(values: Iterable[Any]) -> Iterable[Kernel]:
    # A function may be there by several names.
    for function in {id(value): value for value in values}.values():
        declared = getattr(function, _KERNELS, ())
        if isinstance(declared, tuple):
            yield from declared


def load_module_kernels(
    library: str, backend: str, known: Iterable[str], device: str
) -> dict[type[OperationSpec], Kernel]:
    """Import a module of kernels that has the name of a library; blocks.

    Args:
        library: Its import path.
        backend: Name of the backend.
        known: Libraries that the backend has, for the error.
        device: Name of the device, for the error.

    Raises:
        NotSupportedError: There is no such module, or it has no kernel for this backend.
        ImportError: An import in the module failed.
    """
    try:
        module: ModuleType = importlib.import_module(library)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if library != missing and not library.startswith(f"{missing}."):
            raise
        raise NotSupportedError(
            f"the {backend.upper()} backend has no library {library!r}; it has {', '.join(sorted(known))}, "
            "and there is no module of this name with kernels",
            backend=backend,
            device=device,
        ) from error
    kernels = kernels_of(vars(module), backend)
    if not kernels:
        raise NotSupportedError(
            f"module {library!r} has no kernels for backend {backend!r}; "
            f'declare them with @kernel(Spec, backend="{backend}")',
            backend=backend,
            device=device,
        )
    return kernels
