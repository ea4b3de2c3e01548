"""Expressions on CUDA: C++ made of them, compiled once for each set of types and layouts."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import TypeAlias

import attrs

from ...base import DType, NotSupportedError
from ...base.expressions import SCALAR_BYTES, Argument, ElementwiseRecipe, ReductionRecipe
from ...base.kernels import kernel
from ...base.ops import ArraySpec, ElementwiseSpec, OperationSpec, ReductionSpec
from ..kit._call import Call
from ..kit._device import LibraryDevice
from ..kit._library import CudaLibrary
from ..runtime._kernels import Function, Module
from ._expression_source import Access, Layouts, elements_of_thread, elementwise_source
from ._reduction_source import REDUCTION_THREADS, ReductionLayouts, partial_bytes, reduction_source

__all__ = ["ExpressionLibrary", "ExpressionPlan"]

# What a kernel may take on every device.
_MOST_ARGUMENT_BYTES = 4096
# Numbers of elements, with a grid's step added, are 32 bits up to here.
_NARROW = 1 << 30
# More threads than the device has at once: those that are done make way.
_MOST_BLOCKS = (1 << 31) - 1
# Reduced elements that each thread has at least, before a result is made in parts.
_LEAST_ELEMENTS = 4
# More parts than this are combined by a block, fewer by a thread.
_MOST_SERIAL = 64

_Shape: TypeAlias = tuple[int, ...]
_Strides: TypeAlias = tuple[_Shape, ...]


@attrs.define(eq=False)
class ExpressionPlan:
    """A compiled expression.

    Attributes:
        module: Its kernels.
        arguments: The structure that they take.
        partial: Of a reduction: bytes of what one thread hands on.
        each: How many elements a thread takes at a time.
    """

    module: Module
    arguments: struct.Struct
    partial: int = 0
    each: int = 1

    @property
    def is_busy(self) -> bool:
        """Whether a stream may still use it."""
        return self.module.is_busy

    def close(self) -> None:
        """Unload it. The context is current."""
        self.module.close()


@attrs.frozen
class _Elements:
    """How the elements of an operation lie, when axes that lie in one go are one."""

    shape: _Shape
    strides: _Strides
    layouts: Layouts


@attrs.frozen
class _Reduced:
    """The same for a reduction: axes that stay, and axes that are reduced."""

    outputs: int
    count: int
    kept_shape: _Shape
    reduced_shape: _Shape
    kept_strides: _Strides
    reduced_strides: _Strides
    layouts: ReductionLayouts


class ExpressionLibrary(CudaLibrary):
    """Enqueues expressions. A plan is a kernel for certain types and layouts, whatever the extents."""

    def _key_of(self, spec: OperationSpec) -> tuple[object, ...]:
        if isinstance(spec, ElementwiseSpec):
            return ElementwiseSpec, spec.recipe, _elements(spec).layouts
        if isinstance(spec, ReductionSpec):
            return ReductionSpec, spec.recipe, _reduced(spec).layouts
        return super()._key_of(spec)

    def _compile_elementwise(self, spec: ElementwiseSpec, device: LibraryDevice) -> ExpressionPlan:
        recipe, layouts = ElementwiseRecipe.decode(spec.recipe), _elements(spec).layouts
        arrays, scalars = _split(recipe.arguments)
        count = len(spec.arrays) + len(spec.results)
        form = f"q{len(spec.results)}Q{max(len(spec.arrays), 1)}Q{_scalar_bytes(scalars)}s"
        form += f"{layouts.axes or 1}q{count * (layouts.axes or 1)}q"
        arguments = _structure(form)
        source = elementwise_source(recipe.typed, arrays, scalars, layouts)
        module = self._device.kernels.load(source, ["elementwise"], arguments.size)
        dtypes = [array.dtype for array in (*spec.results, *spec.arrays)]
        each = elements_of_thread(dtypes, len(recipe.typed.steps))
        return ExpressionPlan(module, arguments, each=each)

    @kernel(ElementwiseSpec, backend="cuda", plan=_compile_elementwise)
    def _elementwise(self, spec: ElementwiseSpec, call: Call) -> None:
        elements, plan = _elements(spec), call.plan
        count = spec.results[0].size
        if not count:
            return
        (function,) = plan.module.functions
        at = call.device.address
        addresses = [at(array) for array in spec.results]
        addresses += [at(array) for array in spec.arrays] or [0]
        with function as buffer:
            plan.arguments.pack_into(
                buffer, 0, count, *addresses, spec.scalars, *elements.shape,
                *(step for strides in elements.strides for step in strides),
            )  # fmt: skip
            function.launch(call.handle, -(-count // plan.each), most=_MOST_BLOCKS)
        plan.module.note_use(call.stream)

    def _compile_reduction(self, spec: ReductionSpec, device: LibraryDevice) -> ExpressionPlan:
        recipe, layouts = ReductionRecipe.decode(spec.recipe), _reduced(spec).layouts
        arrays, scalars = _split(recipe.arguments)
        reduction, count = recipe.typed, len(spec.arrays)
        kept, reduced = max(layouts.kept, 1), max(layouts.reduced, 1)
        form = f"5q2Q{count}Q{_scalar_bytes(scalars)}s{kept}q{reduced}q{count * kept}q{count * reduced}q"
        arguments = _structure(form)
        source = reduction_source(reduction, arrays, scalars, layouts)
        names = ["reduce", "finish_block", "finish_serial"]
        module = self._device.kernels.load(source, names, arguments.size)
        return ExpressionPlan(module, arguments, partial_bytes(reduction))

    @kernel(ReductionSpec, backend="cuda", plan=_compile_reduction)
    def _reduce(self, spec: ReductionSpec, call: Call) -> None:
        found, plan = _reduced(spec), call.plan
        outputs, count = found.outputs, found.count
        if not outputs:
            return
        is_block = found.layouts.is_block
        parts = _parts(found, call.device.kernels.most_blocks)
        partial = call.workspace(outputs * parts * plan.partial if parts > 1 else 0)
        # Blocks lay the parts of a result side by side; threads lay results side by side.
        steps = (1, parts) if is_block else (outputs, 1)
        at = call.device.address
        values = (
            outputs, count, parts, *steps, at(spec.out), partial, *(at(array) for array in spec.arrays),
            spec.scalars, *(found.kept_shape or (0,)), *(found.reduced_shape or (0,)),
            *_flat(found.kept_strides, len(spec.arrays)), *_flat(found.reduced_strides, len(spec.arrays)),
        )  # fmt: skip
        first, ends_by_block, ends_by_thread = plan.module.functions
        items = outputs * parts
        _launch(plan, first, call, values, items * REDUCTION_THREADS if is_block else items)
        if parts > 1:
            is_block = parts > _MOST_SERIAL
            last = ends_by_block if is_block else ends_by_thread
            _launch(plan, last, call, values, outputs * REDUCTION_THREADS if is_block else outputs)


def _launch(
    plan: ExpressionPlan, function: Function, call: Call, values: tuple[object, ...], threads: int
) -> None:
    with function as buffer:
        plan.arguments.pack_into(buffer, 0, *values)
        function.launch(call.handle, threads, threads=REDUCTION_THREADS)
    plan.module.note_use(call.stream)


def _parts(found: _Reduced, most_blocks: int) -> int:
    """In how many parts each result is made, so that the device is full."""
    is_block = found.layouts.is_block
    units = most_blocks if is_block else most_blocks * REDUCTION_THREADS
    each = _LEAST_ELEMENTS * (REDUCTION_THREADS if is_block else 1)
    return max(1, min(units // found.outputs, -(-found.count // each)))


def _is_by_block(outputs: int, count: int, kept_strides: _Strides, reduced_strides: _Strides) -> bool:
    """Whether threads of a block had better read one after another along the axes that are reduced."""
    steps = [
        (abs(kept[-1]) if kept else 0, abs(reduced[-1]) if reduced else 0)
        for kept, reduced in zip(kept_strides, reduced_strides, strict=True)
    ]
    kept, reduced = max(steps, default=(0, 0), key=sum)
    return count > REDUCTION_THREADS // 8 and (outputs == 1 or reduced <= kept)


def _split(arguments: Sequence[Argument]) -> tuple[list[DType | None], list[DType]]:
    """Dtypes of the arrays, with None for scalars; and those of the scalars."""
    arrays = [argument.dtype if argument.is_array else None for argument in arguments]
    return arrays, [argument.dtype for argument in arguments if not argument.is_array]


def _scalar_bytes(scalars: Sequence[DType]) -> int:
    return SCALAR_BYTES * max(len(scalars), 1)


def _structure(form: str) -> struct.Struct:
    made = struct.Struct(f"<{form}")
    if made.size > _MOST_ARGUMENT_BYTES:
        raise NotSupportedError(
            f"the expression has too many arrays with too many axes: {made.size} bytes of arguments, "
            f"{_MOST_ARGUMENT_BYTES} are possible; compute it in two steps",
            backend="cuda",
        )
    return made


def _elements(spec: ElementwiseSpec) -> _Elements:
    arrays = (*spec.results, *spec.arrays)
    return _find_elements(
        spec.results[0].shape,
        tuple([array.strides for array in arrays]),
        tuple([array.dtype.itemsize for array in arrays]),
    )


@functools.lru_cache(4096)
def _find_elements(shape: _Shape, strides: _Strides, sizes: _Shape) -> _Elements:
    is_wide = math.prod(shape) >= _NARROW
    shape, strides = merged(shape, strides)
    if len(shape) > 1:
        return _Elements(shape, strides, Layouts(len(shape), (), is_wide))
    access: tuple[Access, ...] = tuple(_access(each, size) for each, size in zip(strides, sizes, strict=True))
    return _Elements(
        shape or (1,), tuple(each or (0,) for each in strides), Layouts(len(shape), access, is_wide)
    )


def _reduced(spec: ReductionSpec) -> _Reduced:
    arrays: Sequence[ArraySpec] = spec.arrays
    return _find_reduced(
        arrays[0].shape,
        spec.axes,
        tuple([array.strides for array in arrays]),
        tuple([array.dtype.itemsize for array in arrays]),
    )


@functools.lru_cache(4096)
def _find_reduced(shape: _Shape, axes: _Shape, strides: _Strides, sizes: _Shape) -> _Reduced:
    staying = [axis for axis in range(len(shape)) if axis not in axes]
    kept_shape, reduced_shape = (tuple(shape[axis] for axis in each) for each in (staying, axes))
    outputs, count = math.prod(kept_shape), math.prod(reduced_shape)
    kept_shape, kept_strides = merged(kept_shape, tuple(tuple(s[a] for a in staying) for s in strides))
    reduced_shape, reduced_strides = merged(reduced_shape, tuple(tuple(s[a] for a in axes) for s in strides))
    access: tuple[Access, ...] = tuple(
        _access(each, size) for each, size in zip(reduced_strides, sizes, strict=True)
    )
    layouts = ReductionLayouts(
        len(kept_shape), len(reduced_shape), access if len(reduced_shape) <= 1 else (),
        max(outputs, count) >= _NARROW,
        _is_by_block(outputs, count, kept_strides, reduced_strides),
    )  # fmt: skip
    return _Reduced(outputs, count, kept_shape, reduced_shape, kept_strides, reduced_strides, layouts)


def _access(strides: _Shape, size: int) -> Access:
    if not strides or not strides[0]:
        return "same"
    return "dense" if strides[0] == size else "strided"


def _flat(strides: _Strides, count: int) -> list[int]:
    return [step for each in strides for step in each] or [0] * count


def merged(shape: _Shape, strides: _Strides) -> tuple[_Shape, _Strides]:
    """Axes in their order, without those of one element, and with those that lie in one go as one."""
    extents: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, extent in enumerate(shape):
        if extent == 1:
            continue
        if extents and all(
            known[-1] == each[axis] * extent for known, each in zip(steps, strides, strict=True)
        ):
            extents[-1] *= extent
            for known, each in zip(steps, strides, strict=True):
                known[-1] = each[axis]
            continue
        extents.append(extent)
        for known, each in zip(steps, strides, strict=True):
            known.append(each[axis])
    return tuple(extents), tuple(tuple(each) for each in steps)
