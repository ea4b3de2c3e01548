"""Functions of arrays on CUDA: C++ made of expressions, compiled once for each set of types and layouts."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from ...base.expressions.compiled import (
    MOST_BLOCKS,
    KernelSource,
    elementwise_arguments,
    make_kernel,
    plan_key,
    reduction_launch,
)
from ...base.kernels import kernel
from ...base.ops import ElementwiseSpec, OperationSpec, ReductionSpec
from ..kit._library import CudaLibrary, KernelCall, LibraryDevice
from ..runtime._kernels import Function, Module

__all__ = ["ArraysLibrary"]


@attrs.define(eq=False)
class _Plan:
    """A compiled expression.

    Attributes:
        source: Its source.
        module: Its kernels.
        functions: The same by their names.
    """

    source: KernelSource
    module: Module
    functions: dict[str, Function]

    @property
    def is_busy(self) -> bool:
        """Whether a stream may still use it."""
        return self.module.is_busy

    def close(self) -> None:
        """Unload it. The context is current."""
        self.module.close()

    def launch(self, name: str, call: KernelCall, values: tuple[object, ...], count: int, **how: int) -> None:
        """Launch one of the kernels, by so many threads."""
        function = self.functions[name]
        with function as buffer:
            self.source.arguments.pack_into(buffer, 0, *values)
            function.launch(call.handle, count, **how)
        self.module.note_use(call.stream)


class ArraysLibrary(CudaLibrary):
    """Enqueues expressions. A plan is a kernel for certain types and layouts, whatever the extents."""

    name = "arrays"
    # Each is a module in device memory.
    most_plans: ClassVar[int] = 256

    def _key_of(self, spec: OperationSpec) -> tuple[object, ...]:
        if isinstance(spec, (ElementwiseSpec, ReductionSpec)):
            return plan_key(spec)
        return super()._key_of(spec)

    def _close_plan(self, plan: Any) -> None:
        plan.close()

    def _is_busy(self, plan: Any) -> bool:
        return bool(plan.is_busy)

    def _compile(self, spec: ElementwiseSpec | ReductionSpec, device: LibraryDevice) -> _Plan:
        source = make_kernel(spec, "cuda")
        module = device.kernels.load(source.text, source.names, source.arguments.size)
        return _Plan(source, module, dict(zip(source.names, module.functions, strict=True)))

    @kernel(ElementwiseSpec, backend="cuda", plan=_compile)
    def _elementwise(self, spec: ElementwiseSpec, call: KernelCall) -> None:
        plan, count = call.plan, spec.results[0].size
        if count:
            values = elementwise_arguments(spec, plan.source, call.device.address)
            plan.launch("elementwise", call, values, -(-count // plan.source.each), most=MOST_BLOCKS)

    @kernel(ReductionSpec, backend="cuda", plan=_compile)
    def _reduce(self, spec: ReductionSpec, call: KernelCall) -> None:
        plan = call.plan
        how = reduction_launch(spec, plan.source, call.device.kernels.most_blocks)
        if how is None:
            return
        values = how.values(call.device.address, call.workspace(how.partial))
        plan.launch("reduce", call, values, how.threads, threads=how.block)
        if how.finish:
            plan.launch(how.finish, call, values, how.finish_threads, threads=how.block)
