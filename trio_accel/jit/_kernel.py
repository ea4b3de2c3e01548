"""Kernels of the user's own: how they are declared, the message that launches one, and its actor.

An occupancy describes the resources that a kernel needs on a device, and how many of its blocks fit.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import attrs

from ..backends.base.contract.ops import (
    Dim3,
    KernelCode,
    KernelDefinition,
    KernelInfoSpec,
    KernelParameter,
    KernelSpec,
    TensorMap,
    scalar_offsets,
)
from ..backends.base.contract.values import element
from ..devices import (
    AccelRef,
    ArrayFunction,
    Call,
    Device,
    LibraryActor,
    Operand,
    Operation,
    Planned,
    Planner,
)
from ..expressions import bind
from ._declarations import (
    ArgumentRule,
    Code,
    CompileOptions,
    Extents,
    LaunchRule,
    Parameter,
    Scalars,
    as_code,
    check_array,
    check_block,
    check_grid,
    check_shared,
    extents,
    shape_of,
)

__all__ = ["JitActor", "Kernel", "LaunchKernel", "Occupancy", "QueryOccupancy"]


class JitActor(LibraryActor):
    """Serves launches of kernels, on a stream of its own.

    CPU backend: functions named by import path. CUDA: NVRTC, nvJitLink and the driver.
    """

    library = "jit"


@attrs.frozen(kw_only=True)
class Occupancy:
    """A kernel on a device, with blocks of a given size.

    Attributes:
        max_active_blocks: Blocks that run at once on one multiprocessor; 0 for blocks that do not fit.
        suggested_block: Threads of a block with which the most threads run at once.
        suggested_grid: Blocks of that size that fill the device.
        max_active_clusters: Clusters that run at once on the device; 0 for a kernel without clusters.
        max_threads: The most threads that a block can have.
        registers: Registers of a thread.
        static_shared: Bytes of static shared memory.
        max_dynamic_shared: The most bytes of dynamic shared memory that a block can have.
        local_bytes: Bytes of local memory of a thread: spilled registers, and arrays.
        multiprocessors: The number of the device's multiprocessors.
    """

    max_active_blocks: int
    suggested_block: int
    suggested_grid: int
    max_active_clusters: int
    max_threads: int
    registers: int
    static_shared: int
    max_dynamic_shared: int
    local_bytes: int
    multiprocessors: int


@attrs.define(eq=False, on_setattr=None)
class QueryOccupancy(Operation[JitActor, Occupancy]):
    """Asks what a kernel needs; see `Kernel.occupancy`."""

    name: str
    definition: str
    block: Dim3
    shared: int
    library: ClassVar[str] = "trio_accel.jit:JitActor"

    @property
    def operation(self) -> str:
        """Name of the operation: the kernel's."""
        return self.name

    def plan(self, planner: Planner) -> Planned[Occupancy]:
        """Name the status words with the results."""
        words = planner.status(len(KernelInfoSpec.WORDS))

        def finish() -> Occupancy:
            return Occupancy(**dict(zip(KernelInfoSpec.WORDS, map(int, words), strict=True)))

        return Planned(KernelInfoSpec(self.definition, self.block, self.shared, words), finish=finish)


_MOST_CLUSTER = 16


class Kernel:
    """A kernel of your own: declared once, launched on any device.

    A launch is an operation like any other: it is ordered after the operations that its arrays wait for, is
    complete when the device has done it, and runs in a worker process if the device has one. The kernel is
    compiled on its first launch on a device, off the event loop.

    It gets arrays as pointers to their first elements, or as tensor maps (see `TensorMap`), and scalars by
    value, in the order of their declarations. Grid, block, shared memory and the shapes of outputs are given,
    or follow from the arguments.

    >>> import trio_accel as ta
    >>> scale = ta.jit.Kernel(
    ...     "scale",
    ...     'extern "C" __global__ void scale(long long n, float a, float* x) {'
    ...     "    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;"
    ...     "    if (i < n) x[i] *= a;"
    ...     "}",
    ...     parameters={
    ...         "n": ta.jit.scalar("int64"), "a": ta.jit.scalar("float32"), "x": ta.jit.updates("float32"),
    ...     },
    ...     grid=lambda n: ta.jit.cdiv(n, 256),
    ...     block=256,
    ... )
    >>> scale
    <Kernel scale(n: int64, a: float32, x: float32[])>

    Args:
        name: The kernel's name, or a template's instance, such as ``"scale<float, 4>"``.
        code: CUDA C++ as a text, or a result of `source`, `ptx`, `cubin`, `fatbin` or `ltoir`.
        parameters: The parameters by name, in order: `reads`, `updates`, `writes` and `scalar`.
        grid: Blocks of a launch.
        block: Threads of a block.
        shared: Bytes of dynamic shared memory for a block.
        cluster: Blocks of a cluster.
        cooperative: Whether all blocks run at once, so that they may wait for one another.
        skip_empty: Whether a launch with an empty grid does nothing; otherwise it is refused.
        options: Options of the compiler.
        link: More code, which nvJitLink links with the first.
        cpu: Import path of a function, ``"module:function"``, that computes the same on the CPU backend. It
            is called with NumPy arrays and scalars in the order of the parameters, in a thread.

    Raises:
        TypeError, ValueError: A wrong argument; the message names it.
    """

    __slots__ = (
        "_asked",
        "_block",
        "_definition",
        "_grid",
        "_mapped",
        "_names",
        "_optional",
        "_scalars",
        "_shared",
        "_skips_empty",
        "_steps",
        "_text",
        "operation",
    )

    def __init__(
        self,
        name: str,
        code: Code,
        *,
        parameters: Mapping[str, Parameter],
        grid: Extents,
        block: Extents,
        shared: int | LaunchRule[int] = 0,
        cluster: int | Sequence[int] | None = None,
        cooperative: bool = False,
        skip_empty: bool = False,
        options: CompileOptions | None = None,
        link: Sequence[Code] = (),
        cpu: str | None = None,
    ) -> None:
        called: object = name
        if not isinstance(called, str) or not called.strip():
            raise ValueError(f"Kernel: name must be the name of a kernel, got {called!r}")
        self.operation: str = f"jit.{name}"
        self._asked = ArrayFunction(self.operation, self.launch)
        """Name of its launches, in errors and events."""
        label, base = f"Kernel {name!r}", name.partition("<")[0].rpartition("::")[2].strip()
        named = _named(label, parameters)
        self._definition = KernelDefinition(
            name=name,
            parameters=named,
            code=tuple(as_code(part, base) for part in (code, *_checked_link(label, link))),
            options=_checked_options(label, options).plain(),
            cluster=None if cluster is None else extents(label, "cluster", cluster),
            is_cooperative=bool(cooperative),
            shared=callable(shared) or bool(shared),
            cpu=_checked_path(label, cpu),
        )
        self._text = self._definition.encode()
        dtypes = self._definition.scalars
        self._scalars = Scalars(dtypes, scalar_offsets(dtypes)[0])
        self._names = names = tuple(parameters)
        self._optional = frozenset(
            name for name, parameter in parameters.items() if parameter.shape is not None
        )
        shapes = [
            None if parameter.shape is None else ArgumentRule(f"shape of {name}", parameter.shape, names)
            for name, parameter in parameters.items()
        ]
        self._steps = tuple(
            (kernel_parameter, shape, parameter.copy)
            for kernel_parameter, shape, parameter in zip(named, shapes, parameters.values(), strict=True)
        )
        maps = [(parameter.name, parameter.layout) for parameter in named]
        self._mapped = [(name, layout) for name, layout in maps if isinstance(layout, TensorMap)]
        with_block = (*names, "block")
        self._block = ArgumentRule("block", _fixed(label, "block", block), names)
        self._grid = ArgumentRule("grid", _fixed(label, "grid", grid), with_block)
        self._shared = ArgumentRule("shared", shared, with_block)
        self._skips_empty = bool(skip_empty)
        self._check_constants(label)

    def _check_constants(self, label: str) -> None:
        """Refuse at the declaration what no launch could do."""
        cluster = self._definition.cluster
        if cluster is not None:
            count = math.prod(cluster)
            if min(cluster) < 1 or count > _MOST_CLUSTER:
                raise ValueError(f"{label}: a cluster must have 1 to {_MOST_CLUSTER} blocks, got {cluster}")
        if self._block.constant is not None:
            check_block(label, self._block.constant)
        if self._grid.constant is not None:
            check_grid(label, self._grid.constant, cluster, may_be_empty=False)
        if self._shared.constant is not None:
            check_shared(label, self._shared.constant)

    def __repr__(self) -> str:
        signature = ", ".join(
            f"{parameter.name}: {parameter.dtype}{'' if parameter.role == 'scalar' else '[]'}"
            for parameter in self._definition.parameters
        )
        return f"<Kernel {self.name}({signature})>"

    @property
    def name(self) -> str:
        """Its name, or name expression."""
        return self._definition.name

    @property
    def definition(self) -> KernelDefinition:
        """Definition of the kernel."""
        return self._definition

    def launch(self, *arguments: Operand | complex, **named: Operand | complex) -> LaunchKernel:
        """Make the message that launches it: ``await device.ask(kernel.launch(...))``.

        Args:
            *arguments: Arguments in the order of the parameters: arrays and numbers.
            **named: The same by name. An output with a shape may be left out.

        Raises:
            TypeError: There are too few or too many arguments, or one with an unknown name.
        """
        return LaunchKernel(self, bind(self.operation, self._names, arguments, named, self._optional))

    def __call__(
        self, *arguments: Operand | complex, **named: Operand | complex
    ) -> Call[tuple[AccelRef, ...]]:
        """Launch it on the device of its arrays, once it is awaited; see `launch`.

        Returns:
            The arrays that it writes or updates, in the order of the parameters.

        Raises:
            TypeError, ValueError: An argument is wrong: arity, dtype, axes, gaps, device; or a grid or a
                block exceeds the limits. Nothing was launched.
            CompilationError: The code does not compile, or lacks the kernel.
            LibraryError: The block or the grid does not fit on the device.
            NotSupportedError: The backend cannot run it.
            ContextLostError: The context was lost while it ran; it may be this kernel's fault.
        """
        return Call(self._asked, arguments, named or None)

    async def occupancy(
        self, device: Device, block: int | Sequence[int] | None = None, shared: int = 0
    ) -> Occupancy:
        """Compile it for a device if necessary, and return its needs and the number of blocks that fit.

        Args:
            device: The device.
            block: Threads of a block; by default the declared number, if that is not a rule.
            shared: Bytes of dynamic shared memory of a block.

        Raises:
            CompilationError: The code does not compile, or lacks the kernel.
            NotSupportedError: The backend cannot compute occupancy.
        """
        constant = self._block.constant
        threads = block if block is not None else constant if constant is not None else 1
        chosen = extents(self.operation, "block", threads)
        check_block(self.operation, chosen)
        fixed = check_shared(self.operation, shared)
        return await device.ask(QueryOccupancy(self.operation, self._text, chosen, fixed))

    def plan(
        self, planner: Planner, arguments: Sequence[Operand | complex | None]
    ) -> Planned[tuple[AccelRef, ...]]:
        """Validate the arguments of a launch, and lower it; see `Operation.plan`."""
        taken = _Taken()
        values, scalars, name = taken.values, taken.scalars, planner.name
        for step, argument in zip(self._steps, arguments, strict=True):
            parameter, shape, copies = step
            if parameter.role == "scalar":
                values[parameter.name] = element(name, parameter.name, argument, parameter.dtype)
                scalars.append(values[parameter.name])
            else:
                taken.add_array(planner, parameter, shape, argument, copies)
        if taken.outputs:
            taken.make_outputs(planner)
        grid, block, shared = self._extents(name, values)
        for mapped, tensor_map in self._mapped if 0 not in grid else ():
            tensor_map.check(f"{name}: {mapped}", values[mapped])
        arrays = tuple(taken.read), tuple(taken.updated), tuple(taken.written)
        spec = KernelSpec(self._text, grid, block, shared, *arrays, self._scalars.pack(scalars))
        return Planned(spec, tuple(taken.changed))

    def _extents(self, name: str, values: dict[str, Any]) -> tuple[Dim3, Dim3, int]:
        """Grid, block and shared memory of a launch."""
        block: Any = self._block.constant
        if block is None:
            block = extents(name, "block", self._block.value(values))
            check_block(name, block)
        values.setdefault("block", block)
        grid: Any = self._grid.constant
        if grid is None:
            grid = extents(name, "grid", self._grid.value(values))
            check_grid(name, grid, self._definition.cluster, may_be_empty=self._skips_empty)
        shared: Any = self._shared.constant
        if shared is None:
            shared = check_shared(name, self._shared.value(values))
        return grid, block, shared


class _Taken:
    """The arguments of a launch, taken one by one.

    Attributes:
        values: Arguments of rules, by name.
        read: Arrays that are read.
        updated: Arrays that are changed in place.
        written: Arrays that are written; None for an array to be made.
        scalars: Numbers.
        changed: Arrays that are changed.
        outputs: Outputs with a rule for their shape, and their places in `written` and `changed`.
    """

    __slots__ = ("changed", "outputs", "read", "scalars", "updated", "values", "written")

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.read: list[Any] = []
        self.updated: list[Any] = []
        self.written: list[Any] = []
        self.scalars: list[Any] = []
        self.changed: list[Any] = []
        self.outputs: list[tuple[KernelParameter, ArgumentRule, int, int]] = []

    def add_array(
        self,
        planner: Planner,
        parameter: KernelParameter,
        shape: ArgumentRule | None,
        argument: Any,
        copies: bool,
    ) -> None:
        """Take an array, or a copy of it, or note that it is to be made."""
        name, role = parameter.name, parameter.role
        if role == "read":
            array = planner.read(name, argument)
            self.read.append(array)
        else:
            several = self.updated if role == "update" else self.written
            if shape is not None:
                self.outputs.append((parameter, shape, len(several), len(self.changed)))
                if argument is None:
                    several.append(None)
                    self.changed.append(None)
                    return
            if copies:
                argument = planner.copied(name, argument)
            # A fully written array is in use in the same way.
            array = argument.spec if copies else planner.update(name, argument)
            several.append(array)
            self.changed.append(argument)
        check_array(planner.name, parameter, array)
        self.values[name] = array

    def make_outputs(self, planner: Planner) -> None:
        """Make omitted outputs, and check the shapes of given ones."""
        values = self.values
        for parameter, rule, index, changed in self.outputs:
            name = parameter.name
            shape = shape_of(planner.name, name, rule.value(values))
            if self.changed[changed] is None:
                out = planner.output(shape, parameter.dtype)
                check_array(planner.name, parameter, out.spec)
                self.changed[changed] = out
                values[name] = self.written[index] = out.spec
            elif values[name].shape != shape:
                raise ValueError(
                    f"{planner.name}: {name} must have shape {shape}, got shape {values[name].shape}"
                )


@attrs.define(eq=False, on_setattr=None)
class LaunchKernel(Operation[JitActor, tuple[AccelRef, ...]]):
    """A launch of a kernel; see `Kernel.launch`. Its name is the kernel's, such as ``"jit.saxpy"``.

    Attributes:
        kernel: The kernel.
        arguments: One for each of its parameters; None for an output to be made.
    """

    kernel: Kernel
    arguments: tuple[Operand | complex | None, ...]
    library: ClassVar[str] = "trio_accel.jit:JitActor"

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self.kernel.operation

    def plan(self, planner: Planner) -> Planned[tuple[AccelRef, ...]]:
        """Check the arguments, and find grid and block."""
        return self.kernel.plan(planner, self.arguments)


def _fixed(label: str, purpose: str, value: Extents) -> Any:
    return value if callable(value) else extents(label, purpose, value)


def _named(label: str, parameters: Mapping[str, Parameter]) -> tuple[KernelParameter, ...]:
    """Return the parameters with their names.

    Raises:
        TypeError, ValueError: Something else.
    """
    given_parameters: object = parameters
    if not isinstance(given_parameters, Mapping):
        raise TypeError(f"{label}: parameters must be a dict by their names, got {given_parameters!r}")
    items: Iterable[tuple[object, object]] = parameters.items()
    for name, value in items:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(f"{label}: parameters: {name!r} is not a name of an argument")
        if not isinstance(value, Parameter):
            raise TypeError(
                f"{label}: parameters: {name} must be made by reads, updates, writes or scalar, got {value!r}"
            )
    return tuple(parameter.named(name) for name, parameter in parameters.items())


def _checked_link(label: str, link: object) -> Sequence[Code]:
    if isinstance(link, (str, KernelCode)) or not isinstance(link, Sequence):
        raise TypeError(f"{label}: link must be a list of code, got {type(link).__name__}; give [code]")
    return cast("Sequence[Code]", link)


def _checked_options(label: str, options: object) -> CompileOptions:
    if options is not None and not isinstance(options, CompileOptions):
        raise TypeError(f"{label}: options must be CompileOptions or None, got {options!r}")
    return options or CompileOptions()


def _checked_path(label: str, path: object) -> str | None:
    if path is None:
        return None
    if not isinstance(path, str):
        raise TypeError(
            f"{label}: cpu must be an import path 'package.module:function', by which other processes find "
            f"it, got {path!r}"
        )
    module, separator, name = path.partition(":")
    if not separator or not module or not name or module == "__main__":
        raise ValueError(
            f"{label}: cpu: {path!r} must be an import path 'package.module:function' that any process can "
            "import, so no function of __main__"
        )
    return path
