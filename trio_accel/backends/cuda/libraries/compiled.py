"""Kernels compiled by NVRTC: functions of arrays, random numbers, and kernels of the user's own.

cuRAND's generator would have to be positioned for every array, and then its next draw waits for the stream.
That would block the loop.
"""

from __future__ import annotations

from typing import ClassVar

from ...base import DType, kernel, ops
from ...base.gpu.kernels import CompiledLibrary, PhiloxLibrary
from ...base.gpu.primitives import PRIMITIVE_DTYPES, SORTED_DTYPES, PrimitivesLibrary, Sorter
from ..kit._library import CudaLibrary, KernelCall, LibraryDevice
from ..kit._loaded_kernel import LoadedKernel
from ..runtime._compiler import compile_kernel
from ._radix_sort import RadixSort

_compile = CompiledLibrary.compile_expression


class _ExpressionLibrary(CompiledLibrary, CudaLibrary):
    """Enqueues expressions. A plan is a kernel for certain types and layouts, whatever the extents."""

    # Each is a module in device memory.
    most_plans: ClassVar[int] = 256

    kernel(ops.ExpressionSpec, backend="cuda", plan=_compile)(CompiledLibrary.loop)


_Primitives = PrimitivesLibrary
_ANY, _SORTED = {"x": PRIMITIVE_DTYPES}, {"x": SORTED_DTYPES}
_REAL = {"x": SORTED_DTYPES, "edges": SORTED_DTYPES}


class ArraysLibrary(PrimitivesLibrary, _ExpressionLibrary):
    """Functions of arrays: expressions, and functions that move, order and count elements."""

    name = "arrays"

    kernel(ops.ScanSpec, backend="cuda", dtypes=_ANY | {"out": PRIMITIVE_DTYPES}, plan=_Primitives.plan_scan)(
        _Primitives.scan
    )
    kernel(ops.SelectSpec, backend="cuda", dtypes={"flags": PRIMITIVE_DTYPES}, plan=_Primitives.plan_select)(
        _Primitives.select
    )
    kernel(ops.SortSpec, backend="cuda", dtypes=_SORTED, plan=_Primitives.plan_sort)(_Primitives.sort)
    kernel(ops.GroupSpec, backend="cuda", dtypes=_ANY, plan=_Primitives.plan_group)(_Primitives.group)
    kernel(ops.SearchSpec, backend="cuda", dtypes=_REAL, plan=_Primitives.plan_search)(_Primitives.search)
    kernel(ops.CountSpec, backend="cuda", dtypes=_REAL, plan=_Primitives.plan_count)(_Primitives.count)
    kernel(ops.SegmentSpec, backend="cuda", dtypes=_ANY, plan=_Primitives.plan_segments)(
        _Primitives.combine_segments
    )

    def make_sorter(self, key: DType, value: DType | None, *, descending: bool) -> Sorter:
        """Compile the vendor's radix sort; see `PrimitivesLibrary.make_sorter`."""
        return RadixSort(key, value, descending=descending, architecture=self._device.architecture)


class JitLibrary(_ExpressionLibrary):
    """A plan is a loaded kernel: so it is compiled where that may block, and kept while it is used."""

    name = "jit"

    def _load(self, spec: ops.KernelSpec | ops.KernelInfoSpec, device: LibraryDevice) -> LoadedKernel:
        definition = ops.KernelDefinition.decode(spec.definition)
        return LoadedKernel(self._context, definition, compile_kernel(definition, self._device.architecture))

    @kernel(ops.KernelSpec, backend="cuda", plan=_load)
    def _launch(self, spec: ops.KernelSpec, call: KernelCall) -> None:
        call.plan.launch(spec, call)

    @kernel(ops.KernelInfoSpec, backend="cuda", plan=_load)
    def _inform(self, spec: ops.KernelInfoSpec, call: KernelCall) -> None:
        call.plan.inform(spec)


class RandomLibrary(PhiloxLibrary, CudaLibrary):
    """Kernels of the backend's own; the Philox-4x32-10 kernel has cuRAND's order and arithmetic."""

    name = "random"

    kernel(ops.PhiloxSpec, backend="cuda", plan=PhiloxLibrary.plan, is_quick=True)(PhiloxLibrary.philox)
    kernel(ops.SequenceSpec, backend="cuda", plan=PhiloxLibrary.plan_draw)(PhiloxLibrary.sequence)
    kernel(ops.RejectionSpec, backend="cuda", plan=PhiloxLibrary.plan_draw)(PhiloxLibrary.rejection)
    kernel(ops.SobolSpec, backend="cuda", plan=PhiloxLibrary.plan_draw)(PhiloxLibrary.sobol)
