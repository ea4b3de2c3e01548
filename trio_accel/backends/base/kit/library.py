"""Libraries of backends: where one is, its table of kernels, and the plans of their operations.

And the whole library, and the launch as kernels see it, of a backend that computes in threads of streams.
"""

from __future__ import annotations

import importlib.util
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, Protocol, runtime_checkable

import attrs
import numpy as np

from ..contract.dtypes import HostArray
from ..contract.errors import AccelError, NotSupportedError, OutOfMemoryError
from ..contract.ops import ArraySpec, ChainSpec, OperationSpec, StatusArray
from ..contract.protocols import AccelDevice, AccelStream, CacheCounts, InThread
from .checks import check_dtypes, check_shapes
from .kernels import KernelDevice, KernelEntry, kernels_of
from .modules import import_alone

_PLANNED = InThread()


@attrs.frozen
class LibraryEntry:
    """A library of a backend.

    Attributes:
        module: Its module, below the backend's package.
        cls: Its class in that module; empty where the module's kernels are functions.
        needs: The vendor's library for it, as the backend names it; empty for none.
        package: Python package of an extra that it needs; empty for none.
        uses: One that it is faster by, and can do without; empty for none.
    """

    module: str
    cls: str = ""
    needs: str = ""
    package: str = ""
    uses: str = ""

    @property
    def has_package(self) -> bool:
        """Whether the package that it needs is installed, if any."""
        return not self.package or importlib.util.find_spec(self.package) is not None

    def load(self, package: str | None) -> ModuleType:
        """Import the module; blocks.

        Args:
            package: The backend's package.

        Raises:
            ImportError: The module, or one that it needs, cannot be imported.
        """
        return import_alone(self.module, package)


class TableLibrary:
    """Base of backends' libraries: finds the kernel of an operation, and its plan.

    A kernel is called as ``kernel(spec, call)``, and its `plan` function, if any, as ``plan(spec, device)``.
    Kernels are functions passed in, or methods of a subclass. An operation is checked once for each plan key:
    shapes and dtypes must fit each other, the kernel must declare the dtypes, and `plan` may refuse it.

    Args:
        device: The device.
        kernels: The kernels by the names of their operations; the kernels of the class are added.
        counts: Counts the plans.

    Attributes:
        name: Name of the library, such as ``"blas"``.
        backend: Name of the backend.
        most_plans: The most cached plans.
        has_threads: Whether kernels run in threads anyway, so that none needs one for blocking.
    """

    name: str
    backend: ClassVar[str]
    most_plans: ClassVar[int] = 1024
    has_threads: ClassVar[bool] = False

    def __init__(
        self,
        device: KernelDevice,
        kernels: Mapping[str, KernelEntry] | None = None,
        counts: CacheCounts | None = None,
    ) -> None:
        self._for_plans = device
        self._read_only: AbstractSet[int] = getattr(device, "read_only", frozenset[int]())
        self._kernels = {**(kernels or {}), **self._methods()}
        if self.has_threads:
            self._kernels = {
                name: attrs.evolve(entry, is_blocking=False) for name, entry in self._kernels.items()
            }
        self._plans = PlanCache(self.most_plans, self._close_plan, self._is_busy, counts or CacheCounts())
        # Keys of operations without a plan that may be launched.
        self._checked = PlanCache(self.most_plans)
        # The last query and its result, because an operation is prepared, and then enqueued.
        self._last: tuple[OperationSpec | None, Any] = (None, None)

    def _methods(self) -> dict[str, KernelEntry]:
        """Return the kernels that the class declares, as methods of this object."""
        kernels: dict[str, KernelEntry] = {}
        for cls in reversed(type(self).__mro__):
            kernels.update(kernels_of(vars(cls), self.backend))
        return {
            operation: attrs.evolve(
                kernel,
                function=partial(kernel.function, self),
                plan=None if kernel.plan is None else partial(kernel.plan, self),
            )
            for operation, kernel in kernels.items()
        }

    @property
    def operations(self) -> frozenset[str]:
        """Names of the operations that `enqueue` takes."""
        return frozenset(self._kernels)

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        """Make the plan of an operation, if it is missing; see `KernelLibrary.prepare`."""
        kernel = self._kernels.get(spec.operation)
        if kernel is None or not kernel.prepares:
            return None
        if kernel.is_blocking:
            is_planned = kernel.plan is None or kernel.is_quick or self._find_plan(spec) is not None
            return _PLANNED if is_planned else InThread(self._planning(spec, kernel))
        return None if self._find_plan(spec) is not None else self._planning(spec, kernel)

    def _planning(self, spec: OperationSpec, kernel: KernelEntry) -> Callable[[], None]:
        return partial(self._make_plan, spec, kernel)

    def _kernel_of(self, spec: OperationSpec) -> KernelEntry:
        """Find the kernel of an operation.

        Raises:
            NotSupportedError: The operation lacks a kernel.
            ValueError: The operation would write to memory that is mapped for reading.
        """
        kernel = self._kernels.get(spec.operation)
        if kernel is None:
            raise NotSupportedError(
                f"the {self.backend.upper()} backend's library {self.name!r} has no {spec.operation}",
                backend=self.backend,
                device=self._for_plans.info.name,
            )
        if self._read_only:
            _, written = spec.described.blocks(spec)
            if borrowed := self._read_only & {*written}:
                raise ValueError(
                    f"{spec.operation}: blocks {sorted(borrowed)} are another device's, read-only"
                )
        return kernel

    def _foreign(self, stream: object) -> TypeError:
        name = self.backend.upper()
        return TypeError(f"stream: the {name} backend enqueues on its own streams, not on {stream!r}")

    def _key_of(self, spec: OperationSpec) -> tuple[object, ...]:
        """Return the key of an operation's plan; by default layouts and exact values."""
        return spec.described.plan_key(spec)

    def _find_plan(self, spec: OperationSpec) -> Any:
        """Return the plan of an operation; None if it is missing."""
        last_spec, plan = self._last
        if last_spec is not spec:
            plan = self._plans.find(self._key_of(spec))
            self._last = spec, plan
        return plan

    def _make_plan(self, spec: OperationSpec, kernel: KernelEntry) -> Any:
        """Check whether an operation may be launched, and make its plan.

        Raises:
            NotSupportedError: The kernel lacks a dtype, or `plan` refuses the operation.
            LibraryError: Shapes do not fit, or `plan` refuses the operation.
        """
        try:
            check_shapes(self.backend, self.name, spec)
            check_dtypes(self.backend, spec, kernel.dtypes)
            if kernel.plan is None:
                return None
            try:
                plan = kernel.plan(spec, self._for_plans)
            except Exception as error:
                # D134: it needs a specification and a device, so it is first tried here, and not at import.
                error.add_note(f"in the plan of the kernel of {kernel.operation} at {kernel.location}")
                raise
        except AccelError as error:
            error.device = self._for_plans.info.name
            raise
        self._plans.store(self._key_of(spec), plan)
        self._last = spec, plan
        return plan

    def _plan_of(self, spec: OperationSpec, kernel: KernelEntry) -> Any:
        """Return the plan of an operation, made now if it was not prepared; None if it needs none."""
        if kernel.plan is None:
            if kernel.dtypes:
                key = self._key_of(spec)
                if self._checked.find(key) is None:
                    self._make_plan(spec, kernel)
                    self._checked.store(key, spec.operation)
            return None
        plan = self._find_plan(spec)
        if plan is None:
            plan = self._make_plan(spec, kernel)
        self._plans.note_launch(plan)
        return plan

    def _close_plan(self, plan: Any) -> None:
        """Release an evicted plan; by default there is nothing to do."""

    def _is_busy(self, plan: Any) -> bool:
        """Return whether a stream may still use a plan; by default plans are plain values."""
        return False


@attrs.define(eq=False)
class PlanCache:
    """Plans by their keys; a new plan evicts the least recently used one.

    Args:
        max_plans: The most plans.
        close: Releases an evicted plan.
        is_busy: Whether work in flight may still use a plan, which stays until then.
        counts: Counts the plans; several tables may share it.
    """

    _max_plans: int
    _close: Callable[[Any], None] | None = None
    _is_busy: Callable[[Any], bool] | None = None
    _counts: CacheCounts = attrs.field(factory=CacheCounts)
    # The plan made last, until a launch has used it.
    _new: Any = None
    _plans: OrderedDict[tuple[object, ...], Any] = attrs.field(
        factory=OrderedDict[tuple[object, ...], Any], init=False
    )

    def __len__(self) -> int:
        """Return the number of plans."""
        return len(self._plans)

    def find(self, key: tuple[object, ...]) -> Any:
        """Return the plan of a key, and note its use; None if there is none."""
        plan = self._plans.get(key)
        if plan is not None:
            try:  # noqa: SIM105  # `suppress` would be three calls for each launch
                self._plans.move_to_end(key)
            except KeyError:
                # The thread of another stream has evicted it meanwhile: graphs on the CPU share libraries.
                pass
        return plan

    def store(self, key: tuple[object, ...], plan: Any) -> None:
        """Add a plan; evict the excess ones that are not in use."""
        self._plans[key] = self._new = plan
        self._counts.created += 1
        excess = len(self._plans) - self._max_plans
        if excess <= 0:
            return
        for old, candidate in tuple(self._plans.items()):
            if not excess or old == key:
                break
            if self._is_busy is None or not self._is_busy(candidate):
                self._plans.pop(old, None)
                excess -= 1
                self._counts.evicted += 1
                if self._close is not None:
                    self._close(candidate)

    def note_launch(self, plan: Any) -> None:
        """Count a launch with this plan: it was found, unless it was made for just this launch."""
        if plan is self._new:
            self._new = None
        else:
            self._counts.hits += 1

    def clear(self) -> None:
        """Release all plans; none is in use."""
        self._new = None
        plans, self._plans = self._plans, OrderedDict()
        if self._close is not None:
            for plan in plans.values():
                self._close(plan)


class ComputingDevice(AccelDevice, Protocol):
    """An open device with kernels that compute with arrays in host memory."""

    def host_view(self, array: ArraySpec, /, *, write: bool = True) -> HostArray:
        """Make the array of a specification; without `write`, of memory that cannot be made writable.

        Raises:
            KeyError: No block has this id.
            ValueError: The array is not within it.
        """
        ...

    def invalidate_with(self, block: int, invalidate: Callable[[int], None]) -> None:
        """Have a function called once, when a block's contents change or it is freed. From any thread."""
        ...

    def exhausted(self, requested: int) -> OutOfMemoryError:
        """Make the error for memory that a kernel needs for itself, and the machine does not have."""
        ...


@runtime_checkable
class ComputesInPlace(Protocol):
    """A library of graphs that can compute chains in any thread while their stream is idle."""

    def quick_runs(self, recipe: bytes, limit: int) -> int:
        """Count the runs of a recipe that took less than `limit` nanoseconds; longer ones undo some."""
        ...

    def bind_chain(self, spec: ChainSpec, stream: AccelStream) -> Sequence[Callable[[], object]] | None:
        """Return functions that compute a chain on its blocks, as often as they are called.

        They are valid while the blocks exist. The chain has no host arrays, and its result is not fetched.
        Errors of the functions are errors of the operations.

        Returns:
            Functions to call in this order, or None if an operation needs the stream's thread.
        """
        ...


@attrs.define(eq=False)
class ComputingCall:
    """One launch: its stream runs it, and its kernel is called with it, in the thread of the stream.

    Attributes:
        plan: Result of the kernel's `plan` function; None without one.
        device: The device.
        stream: The stream.
    """

    _function: Callable[..., object]
    _spec: OperationSpec
    plan: Any
    device: ComputingDevice
    stream: AccelStream
    _rooms: tuple[HostArray, ...] = attrs.field(default=(), init=False)

    def array(self, array: ArraySpec, *, write: bool = True) -> HostArray:
        """Return an array, as a view of its memory; raises as `ComputingDevice.host_view` does."""
        return self.device.host_view(array, write=write)

    def address_of(self, array: ArraySpec) -> int:
        """Return the address of an array's first element; raise as `array` does."""
        return int(self.device.host_view(array).ctypes.data)

    def workspace(self, nbytes: int) -> int:
        """Take `nbytes` bytes of memory, and return the address, valid until the kernel returns; 0 for none.

        Raises:
            MemoryError: There is too little memory; the operation fails with an `OutOfMemoryError`.
        """
        if nbytes <= 0:
            return 0
        room = np.empty(nbytes, np.uint8)
        self._rooms = (*self._rooms, room)
        return int(room.ctypes.data)

    def status(self, words: StatusArray) -> int:
        """Return the address of status words, which are zero now; a kernel may also write to the array."""
        words.fill(0)
        return int(words.ctypes.data)

    def __call__(self) -> None:
        """Run the kernel, and look at the status words if there are any."""
        spec = self._spec
        described = spec.described
        if hasattr(spec, "is_withdrawn"):
            return
        try:
            returned = self._function(spec, self)
            if returned is not None:
                name = getattr(self._function, "__qualname__", self._function)
                raise TypeError(
                    f"the kernel {name} must compute and return None, it returned {type(returned).__name__}"
                )
            if described.has_status:
                spec.check_status()
        except AccelError as error:
            error.device = self.device.info.name
            raise
        except MemoryError as error:
            # Kernels allocated this memory themselves. NumPy's error has the size, other errors do not.
            shape, dtype = getattr(error, "shape", ()), getattr(error, "dtype", None)
            requested = math.prod(shape) * dtype.itemsize if isinstance(dtype, np.dtype) else 0
            raise self.device.exhausted(requested) from error
        finally:
            # A call of a graph is made again.
            self._rooms = ()


class BoundCall(ComputingCall):
    """A launch that is called repeatedly on the same blocks, with views made once."""

    def __init__(
        self,
        function: Callable[..., object],
        spec: OperationSpec,
        plan: Any,
        device: ComputingDevice,
        stream: AccelStream,
    ) -> None:
        super().__init__(function, spec, plan, device, stream)
        self._views: dict[tuple[int, bool], HostArray] = {}

    def array(self, array: ArraySpec, *, write: bool = True) -> HostArray:
        """Return an array; see `ComputingCall.array`."""
        key = id(array), write
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self.device.host_view(array, write=write)
        return view


class ComputingLibrary(TableLibrary):
    """One library of an open device: its kernels run in the threads of streams.

    A backend sets its name and its class of streams, whose `enqueue` calls a function in the stream's thread.

    Args:
        name: Name of the library.
        device: The device.
        kernels: The functions among its kernels.

    Attributes:
        streams: The class of the backend's streams.
    """

    has_threads: ClassVar[bool] = True
    streams: ClassVar[type[Any]]

    def __init__(self, name: str, device: ComputingDevice, kernels: Mapping[str, KernelEntry]) -> None:
        self.name = name
        self._device = device
        super().__init__(device, kernels)

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream; see `KernelLibrary.enqueue`."""
        if not isinstance(stream, self.streams):
            raise self._foreign(stream)
        on: Any = stream
        on.enqueue(self.call_of(spec, stream))

    def call_of(self, spec: OperationSpec, stream: AccelStream) -> ComputingCall:
        """Make a launch, which runs when it is called.

        Raises:
            NotSupportedError: The library lacks this operation or dtype.
            LibraryError: The operation is refused.
        """
        kernel = self._kernel_of(spec)
        plan = self._plan_of(spec, kernel) if kernel.plan is not None or kernel.dtypes else None
        return ComputingCall(kernel.function, spec, plan, self._device, stream)

    def bind(self, spec: OperationSpec, stream: AccelStream) -> Callable[[], object]:
        """Make what runs an operation as often as it is called, while its blocks exist.

        Raises:
            NotSupportedError, LibraryError: As `call_of`.
        """
        kernel = self._kernel_of(spec)
        plan = self._plan_of(spec, kernel) if kernel.plan is not None or kernel.dtypes else None
        call = BoundCall(kernel.function, spec, plan, self._device, stream)
        bound = None if kernel.bind is None else kernel.bind(spec, call)
        return call if bound is None else bound

    def close(self) -> None:
        """Give handles back: there are none."""
