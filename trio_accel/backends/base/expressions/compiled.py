"""Kernels of expressions for GPUs: source, layouts, and the arguments of a launch.

A backend that compiles CUDA C++ or HIP makes a `KernelSource` once for each `plan_key`, and packs the
arguments of each launch into its structure.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import attrs

from ..contract.device_array import merged
from ..contract.dtypes import Ints, Strs
from ..contract.errors import NotSupportedError
from ..contract.ops import ArraySpec, ExpressionSpec
from ._arguments import SCALAR_BYTES, Argument
from ._codec import EncodedProgram, decode_program
from ._rows_source import ROW_THREADS, RowLayouts, partial_bytes, reduction_source, rows_source
from ._source import Access, Layouts, elements_of_thread, elementwise_source, extents_of

__all__ = [
    "MOST_BLOCKS",
    "ROW_THREADS",
    "KernelSource",
    "ReductionLaunch",
    "elementwise_arguments",
    "is_reduction",
    "make_functions",
    "make_kernel",
    "plan_key",
    "reduction_launch",
    "rows_arguments",
]

# Bytes of parameters that a kernel may take on every device.
_MOST_ARGUMENT_BYTES = 4096
# Numbers of elements, with a grid's step added, are 32 bits up to here.
_NARROW = 1 << 30
# Reduced elements that each thread has at least, before a result is made in parts.
_LEAST_ELEMENTS = 4
# The longest rows, in elements, that a thread makes, and that the threads of a warp make.
_SHORT_ROW, _WARP_ROW, _WARP = 32, 1024, 32
# The number of rows that a block makes if neighbouring elements belong to different rows.
_ROWS_ACROSS = 16
# More parts than this are combined by a block, fewer by a thread.
_MOST_SERIAL = 64

MOST_BLOCKS = (1 << 31) - 1
"""Blocks of a kernel for each element: more than the device has at once, those that are done make way."""

_Strides: TypeAlias = tuple[Ints, ...]
_Address: TypeAlias = Callable[[ArraySpec], int]


@attrs.frozen(eq=False)
class KernelSource:
    """The source of an expression's kernels, for certain types and layouts.

    Attributes:
        text: The source.
        names: Names of its kernels.
        arguments: The structure that each of them takes.
        partial: Bytes that one thread of a reduction passes on.
        elements_per_thread: The number of elements that a thread takes at a time.
        axes: The axes of the indices in an element-wise expression.
        is_checked: Whether the last argument is the address of status words, see `check_words`.
    """

    text: str
    names: Strs
    arguments: struct.Struct
    partial: int = 0
    elements_per_thread: int = 1
    axes: Ints = ()
    is_checked: bool = False


@attrs.frozen(eq=False)
class ReductionLaunch:
    """The launch of a reduction.

    Attributes:
        threads: Threads of the first kernel, in blocks of `block`.
        finish: Name of the kernel that combines parts; empty if the first kernel makes the result.
        finish_threads: Threads of the second kernel.
        partial: Bytes of workspace for the parts.
        block: Threads of a block.
        values: Makes the arguments from the addresses of arrays and workspace.
    """

    threads: int
    finish: str
    finish_threads: int
    partial: int
    values: Callable[[_Address, int], tuple[object, ...]]
    block: int = ROW_THREADS


@attrs.frozen
class _Elements:
    """Layouts of an operation's elements, with contiguous axes joined."""

    shape: Ints
    strides: _Strides
    layouts: Layouts


@attrs.frozen
class _Reduced:
    """Layouts of a reduction: axes that remain, and axes that are reduced."""

    outputs: int
    count: int
    kept_shape: Ints
    reduced_shape: Ints
    kept_strides: _Strides
    reduced_strides: _Strides
    layouts: RowLayouts


def plan_key(spec: ExpressionSpec) -> tuple[object, ...]:
    """Return the key of a program's kernel: types and layouts, whatever the extents are."""
    decoded = decode_program(spec.program)
    if not decoded.program.reductions:
        return spec.program, _elements(spec).layouts
    if is_reduction(spec, decoded):
        return spec.program, _reduced(spec).layouts
    reduction, is_whole = _rows(spec, decoded)
    return spec.program, _row_layouts(reduction), is_whole


def is_reduction(spec: ExpressionSpec, program: EncodedProgram) -> bool:
    """Return whether the result is a single reduction, which is made in parts if there are few results."""
    return program.is_one_reduction and math.prod(spec.results[0].shape) == _output_count(
        spec.shape, spec.axes
    )


@functools.lru_cache(4096)
def _output_count(shape: Ints, axes: Ints) -> int:
    """Count the elements of the reduced shape."""
    return math.prod([extent for axis, extent in enumerate(shape) if axis not in axes])


def make_kernel(spec: ExpressionSpec, backend: str) -> KernelSource:
    """Make the source of an operation's kernels.

    Args:
        spec: The operation.
        backend: Name of the backend, for the error.

    Raises:
        NotSupportedError: Too many arrays with too many axes.
    """
    decoded = decode_program(spec.program)
    if not decoded.program.reductions:
        source = make_functions(spec)
    else:
        make = _reduction_kernel if is_reduction(spec, decoded) else _rows_kernel
        source = make(spec, decoded)
    if source.arguments.size > _MOST_ARGUMENT_BYTES:
        raise NotSupportedError(
            f"the expression has too many arrays with too many axes: {source.arguments.size} bytes of "
            f"arguments, {_MOST_ARGUMENT_BYTES} are possible; compute it in two steps",
            backend=backend,
        )
    return source


def make_functions(spec: ExpressionSpec, kernel: str = "") -> KernelSource:
    """Make the source of an expression's functions, with other code instead of its kernel.

    Args:
        spec: The expression and its arrays.
        kernel: C++ that calls ``load_at``, ``compute`` and ``store_at``.
    """
    decoded, layouts = decode_program(spec.program), _elements(spec).layouts
    program, arguments = decoded.program, decoded.arguments
    scalars = sum(not argument.is_array for argument in arguments)
    count = len(spec.arrays) + len(spec.results)
    form = f"q{max(len(spec.results), 1)}Q{max(len(spec.arrays), 1)}Q{_scalar_bytes(scalars)}s"
    form += f"{layouts.axes or 1}q{count * (layouts.axes or 1)}q"
    form += f"{len(spec.loaded) + len(spec.stored)}Q{extents_of(program)}q{'Q' * bool(program.checked)}"
    return KernelSource(
        elementwise_source(program, arguments, layouts, kernel),
        ("elementwise",),
        struct.Struct(f"<{form}"),
        elements_per_thread=elements_of_thread(
            [array.dtype for array in (*spec.results, *spec.arrays)], program.work
        ),
        axes=program.axes,
        is_checked=bool(program.checked),
    )


def elementwise_arguments(
    spec: ExpressionSpec, source: KernelSource, address: _Address
) -> tuple[object, ...]:
    """Return the arguments of a launch, in the order of the structure, without the status words."""
    elements = _elements(spec)
    addresses = [address(array) for array in spec.results] or [0]
    addresses += [address(array) for array in spec.arrays] or [0]
    return (
        math.prod(spec.shape),
        *addresses,
        spec.scalars,
        *elements.shape,
        *[step for strides in elements.strides for step in strides],
        *[address(array) for array in (*spec.loaded, *spec.stored)],
        *_extents(spec, source.axes),
    )


def _reduction_kernel(spec: ExpressionSpec, decoded: EncodedProgram) -> KernelSource:
    layouts = _reduced(spec).layouts
    return KernelSource(
        reduction_source(decoded.program, decoded.arguments, layouts),
        ("reduce", "finish_block", "finish_serial"),
        _row_structure("5q2Q", decoded.arguments, layouts, len(spec.arrays)),
        partial=partial_bytes(decoded.program),
    )


def reduction_launch(spec: ExpressionSpec, source: KernelSource, most_blocks: int) -> ReductionLaunch | None:
    """Find in how many parts a reduction is made.

    Args:
        spec: The reduction.
        source: A result of `make_kernel`.
        most_blocks: The number of blocks that fill the device.

    Returns:
        The launch; None if there is no result.
    """
    reduction = _reduced(spec)
    outputs, count, group = reduction.outputs, reduction.count, reduction.layouts.group
    if not outputs:
        return None
    parts = _parts(reduction, most_blocks)
    # Blocks store the parts of a result next to each other; threads store results next to each other.
    steps = (1, parts) if group > 1 else (outputs, 1)

    def values(address: _Address, partial: int) -> tuple[object, ...]:
        return (
            outputs,
            count,
            parts,
            *steps,
            address(spec.results[0]),
            partial,
            *[address(array) for array in spec.arrays],
            spec.scalars,
            *_layout_values(reduction),
        )

    ends_by_block = parts > _MOST_SERIAL
    return ReductionLaunch(
        threads=outputs * parts * group,
        finish="" if parts == 1 else "finish_block" if ends_by_block else "finish_serial",
        finish_threads=outputs * (ROW_THREADS if ends_by_block else 1),
        partial=outputs * parts * source.partial if parts > 1 else 0,
        values=values,
    )


def _rows_kernel(spec: ExpressionSpec, decoded: EncodedProgram) -> KernelSource:
    reduction, is_whole = _rows(spec, decoded)
    layouts = _row_layouts(reduction)
    source = rows_source(decoded.program, decoded.arguments, layouts, is_whole=is_whole)
    results = len(spec.results)
    structure = _row_structure(f"2q{results}Q", decoded.arguments, layouts, len(spec.arrays) + results)
    return KernelSource(source, ("rows",), structure)


def _row_structure(
    leading_format: str, arguments: Sequence[Argument], layouts: RowLayouts, layers: int
) -> struct.Struct:
    """Return the structure of the arguments: the kernel's own ones, arrays, numbers and layouts."""
    arrays = sum(argument.is_array for argument in arguments)
    axes = max(layouts.kept_axes, 1) + max(layouts.reduced, 1)
    return struct.Struct(
        f"<{leading_format}{arrays}Q{_scalar_bytes(len(arguments) - arrays)}s{(layers + 1) * axes}q"
    )


def _layout_values(reduction: _Reduced) -> list[int]:
    """Return the extents and strides, in the order of the structure."""
    parts = (
        reduction.kept_shape,
        reduction.reduced_shape,
        *reduction.kept_strides,
        *reduction.reduced_strides,
    )
    # There is at least one axis, with an extent and strides that do not count.
    return [number for part in parts for number in part or (0,)]


def rows_arguments(spec: ExpressionSpec, address: _Address) -> tuple[tuple[object, ...], int]:
    """Return the arguments of a launch, in the order of the structure; and by how many threads it is made."""
    reduction, _ = _rows(spec, decode_program(spec.program))
    values = (
        reduction.outputs,
        reduction.count,
        *[address(array) for array in (*spec.results, *spec.arrays)],
        spec.scalars,
        *_layout_values(reduction),
    )
    rows_of_block = ROW_THREADS // _row_layouts(reduction).group
    return values, -(-reduction.outputs // rows_of_block) * ROW_THREADS


def _rows(spec: ExpressionSpec, program: EncodedProgram) -> tuple[_Reduced, bool]:
    """Find the layouts, with the results after the arrays; and whether they have the shape of the arrays."""
    arrays, results = spec.arrays, spec.results
    is_whole = program.is_whole or results[0].size != _output_count(spec.shape, spec.axes)
    of_results = [out.strides if is_whole else _reduced_strides(spec, out.strides) for out in results]
    reduction = _find_reduced(
        spec.shape,
        spec.axes,
        (*[array.strides for array in arrays], *of_results),
        tuple([array.dtype.itemsize for array in (*arrays, *results)]),
    )
    return reduction, is_whole


def _reduced_strides(spec: ExpressionSpec, strides: Ints) -> Ints:
    """Return the strides of a result of the reduced shape along all axes, which are 0 along reduced ones."""
    # The extents of axes that stay, whether or not the others are there with one element.
    remaining_strides = iter(strides)
    is_kept, axes = len(strides) == len(spec.shape), range(len(spec.shape))
    steps = [next(remaining_strides) if is_kept or axis not in spec.axes else 0 for axis in axes]
    return tuple([0 if axis in spec.axes else step for axis, step in enumerate(steps)])


def _row_layouts(reduction: _Reduced) -> RowLayouts:
    if reduction.count <= _SHORT_ROW:
        return attrs.evolve(reduction.layouts, group=1)
    if reduction.layouts.group == 1:
        return attrs.evolve(reduction.layouts, group=ROW_THREADS // _ROWS_ACROSS, is_across=True)
    return attrs.evolve(reduction.layouts, group=_WARP if reduction.count <= _WARP_ROW else ROW_THREADS)


def _parts(reduction: _Reduced, most_blocks: int) -> int:
    """Count the parts in which each result is made, so that the device is full."""
    group = reduction.layouts.group
    units = most_blocks * ROW_THREADS // group
    return max(1, min(units // reduction.outputs, -(-reduction.count // (_LEAST_ELEMENTS * group))))


def _is_by_block(outputs: int, count: int, kept_strides: _Strides, reduced_strides: _Strides) -> bool:
    """Return whether the threads of a block should read along the reduced axes, one after another."""
    steps = [
        (abs(kept_steps[-1]) if kept_steps else 0, abs(reduced_steps[-1]) if reduced_steps else 0)
        for kept_steps, reduced_steps in zip(kept_strides, reduced_strides, strict=True)
    ]
    kept_step, reduced_step = max(steps, default=(0, 0), key=sum)
    return count > ROW_THREADS // 8 and (outputs == 1 or reduced_step <= kept_step)


def _scalar_bytes(count: int) -> int:
    return SCALAR_BYTES * max(count, 1)


def _extents(spec: ExpressionSpec, axes: Sequence[int]) -> Iterator[int]:
    """Yield for each index the elements after its axis and along it, and each load's extents and strides."""
    shape = spec.shape
    for axis in axes:
        yield from (math.prod(shape[axis % len(shape) + 1 :]), shape[axis])
    for array in (*spec.loaded, *spec.stored):
        for pair in zip(array.shape, array.strides, strict=True):
            yield from pair


def _elements(spec: ExpressionSpec) -> _Elements:
    arrays = (*spec.results, *spec.arrays)
    return _find_elements(
        spec.shape,
        tuple([array.strides for array in arrays]),
        tuple([array.dtype.itemsize for array in arrays]),
    )


@functools.lru_cache(4096)
def _find_elements(shape: Ints, strides: _Strides, sizes: Ints) -> _Elements:
    is_wide = math.prod(shape) >= _NARROW
    shape, strides = merged(shape, strides)
    if len(shape) > 1:
        return _Elements(shape, strides, Layouts(len(shape), (), is_wide))
    access: tuple[Access, ...] = tuple(
        _access(array_strides, size) for array_strides, size in zip(strides, sizes, strict=True)
    )
    return _Elements(
        shape or (1,),
        tuple(array_strides or (0,) for array_strides in strides),
        Layouts(len(shape), access, is_wide),
    )


def _reduced(spec: ExpressionSpec) -> _Reduced:
    arrays: Sequence[ArraySpec] = spec.arrays
    return _find_reduced(
        arrays[0].shape,
        spec.axes,
        tuple([array.strides for array in arrays]),
        tuple([array.dtype.itemsize for array in arrays]),
    )


@functools.lru_cache(4096)
def _find_reduced(shape: Ints, axes: Ints, strides: _Strides, sizes: Ints) -> _Reduced:
    staying = [axis for axis in range(len(shape)) if axis not in axes]
    kept_shape, reduced_shape = (tuple(shape[axis] for axis in group) for group in (staying, axes))
    outputs, count = math.prod(kept_shape), math.prod(reduced_shape)
    kept_shape, kept_strides = merged(kept_shape, tuple(tuple(s[a] for a in staying) for s in strides))
    reduced_shape, reduced_strides = merged(reduced_shape, tuple(tuple(s[a] for a in axes) for s in strides))
    access: tuple[Access, ...] = tuple(
        _access(array_strides, size) for array_strides, size in zip(reduced_strides, sizes, strict=True)
    )
    is_by_block = _is_by_block(outputs, count, kept_strides, reduced_strides)
    layouts = RowLayouts(
        len(kept_shape),
        len(reduced_shape),
        access if len(reduced_shape) <= 1 else (),
        max(outputs, count) >= _NARROW,
        ROW_THREADS if is_by_block else 1,
    )
    return _Reduced(outputs, count, kept_shape, reduced_shape, kept_strides, reduced_strides, layouts)


def _access(strides: Ints, size: int) -> Access:
    if not strides or not strides[0]:
        return "same"
    return "dense" if strides[0] == size else "strided"
