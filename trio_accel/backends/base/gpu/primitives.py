"""Order, groups, selections, counts and scans of arrays on GPUs.

The kernels are in ``primitives.cu``, compiled for the types of an operation. A plan is loaded code. A
vendor's library sorts keys, and the backend provides it as a `Sorter`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import attrs
import numpy as np

from ..contract import ops
from ..contract.device_array import DeviceArray
from ..contract.dtypes import DType, Ints
from ..contract.errors import NotSupportedError
from ..contract.ops import ArraySpec
from ..expressions._source import cast_of, element_of, literal_of, prelude, register_of
from .device import AddressDevice
from .driver import KernelFunction, Kernels, LoadedCode
from .kernels import CompiledLibrary
from .library import EnqueuingCall

PRIMITIVE_DTYPES = tuple(dtype for dtype in DType if not dtype.value.startswith("float8"))
"""Dtypes of the elements that kernels compute with."""

SORTED_DTYPES = tuple(dtype for dtype in PRIMITIVE_DTYPES if dtype.kind != "complex")
"""Dtypes of the elements that are sorted."""

_SOURCE = Path(__file__).with_name("primitives.cu")
# Same numbers as in the source: the elements that a block of threads scans at a time, and the bins that a
# block counts by itself.
_THREADS = 256
_TILE = 7 * _THREADS
# One thread scans a line of at most `_MAX_THREAD_LENGTH` elements. So it does if the elements of a line have
# gaps, and there are at least `_MIN_THREAD_LINES` lines.
_MAX_THREAD_LENGTH, _MIN_THREAD_LINES = 64, 4096
# To find few of many elements, a block takes this number of elements, or eight times the number to find.
_LED = 1 << 14
# Indices below this are of 32 bits.
_NARROW = 1 << 31

# Each source part's kernels and their structure, with the axes of a selection.
_PARTS = {
    "SCANS": (("total", "carry", "scan", "scan_lines"), "<3Q6q"),
    "SELECTS": (("move", "find"), "<3Q3q{axes}q{axes}Q"),
    "SORTS": (("encode", "lead", "rows", "gather", "unify"), "<5Q5q"),
    "GROUPS_PUT": (("group", "lengths"), "<9Qq"),
    "SEARCHES": (("search",), "<5Q3q"),
    "COUNTS": (("count",), "<5Q4q"),
    "SEGMENTS": (("segment",), "<4Q2q"),
}

_INFINITE = {DType.float64: 0x7FF << 52, DType.float32: 0xFF << 23, DType.float16: 31 << 10}
_INFINITE[DType.bfloat16] = 0xFF << 7
_COMBINE = {
    "sum": "f_add",
    "prod": "f_multiply",
    "min": "f_minimum",
    "max": "f_maximum",
    "logaddexp": "f_logaddexp",
}

_Call: TypeAlias = EnqueuingCall[Any, Any]
_Device: TypeAlias = AddressDevice[Any, Any, Any]


class Sorter(Protocol):
    """Sorts unsigned keys, or numbers, optionally with a number for each: stable, ascending by their bits.

    -0.0 and 0.0 are equal.
    """

    def __call__(self, call: _Call, keys: _Pair, values: _Pair | None, count: int, bits: int) -> int:
        """Enqueue it.

        Args:
            call: The call.
            keys: Addresses of the keys, and of an equally large buffer.
            values: Addresses of the keys' numbers, and of an equally large buffer.
            count: The number of keys.
            bits: How many lower bits of the keys count.

        Returns:
            The index of the buffer with the result.
        """
        ...


_Pair: TypeAlias = tuple[int, int]


@attrs.define(eq=False)
class _Code(LoadedCode):
    """Compiled kernels.

    Attributes:
        layout: The structure that each of them takes.
        functions: The kernels by their names.
        parts: Other code that the operation needs, by name.
        sorter: Sorts keys, where it needs that.
    """

    layout: struct.Struct
    functions: dict[str, KernelFunction]
    parts: Mapping[str, _Code] = attrs.field(factory=dict[str, "_Code"])
    sorter: Sorter | None = None

    def launch(self, name: str, call: _Call, count: int, *values: object) -> None:
        """Launch a kernel for `count` elements, or blocks of threads."""
        if count:
            self.functions[name].run(call.handle, count, self.layout, *values)
            self._runs.note(call.stream)

    def close(self) -> None:
        """Unload it, and all its parts."""
        super().close()
        for part in self.parts.values():
            part.close()


def _types(**named: DType) -> dict[str, str]:
    """Define classes that load and store elements, and their sizes."""
    definitions: dict[str, str] = {}
    for name, dtype in named.items():
        definitions[name] = element_of(dtype)
        definitions[f"{name.upper()}_SIZE"] = str(dtype.itemsize)
    return definitions


def _bits(itemsize: int) -> str:
    return f"u{8 * itemsize}"


def _number(count: int) -> DType:
    return DType.uint32 if count < _NARROW else DType.uint64


def _cast(source: DType, *through: DType) -> str:
    """C++ of a macro that converts a value step by step."""
    value = "(value)"
    for dtype in through:
        value, source = cast_of(value, source, dtype), dtype
    return value


def _compiled(kernels: Kernels, part: str, defined: Mapping[str, object], **options: Any) -> _Code:
    """Compile one part of the source; blocks."""
    names, fields = _PARTS[part]
    layout = struct.Struct(fields.format(axes=defined.get("AXES")))
    lines = [
        f"#define {name}{'(value)' if '(value)' in str(value) else ''} {value}"
        for name, value in defined.items()
    ]
    text = "\n".join([prelude(), f"#define {part}", *lines, _source()])
    unload, functions = kernels.load(text, names, layout.size)
    return _Code(unload, layout, functions, **options)


def _compiled_scan(
    kernels: Kernels, x: DType, out: DType, wide: DType, combine: str, defined: Mapping[str, object]
) -> _Code:
    defined = {
        **_types(In=x, Out=out),
        "Acc": register_of(wide),
        "COMBINE": _COMBINE[combine],
        "IDENTITY": literal_of(ops.identity_of(combine, wide), wide),
        "GIVE": _cast(wide, out),
        **defined,
    }
    return _compiled(kernels, "SCANS", defined)


def _scan_rows(code: _Code, call: _Call, x: int, out: int, extents: tuple[int, int, int]) -> None:
    """Scan rows of dense elements, in parts if that fills the device."""
    lines, count, initial = extents
    max_blocks = call.device.kernels.most_blocks
    parts = max(1, min(max_blocks // lines, -(-count // _TILE)))
    length = -(-count // parts)
    totals = call.workspace(lines * parts * 16) if parts > 1 else 0
    values = x, out, totals, lines, count, 1, parts, length, initial
    if totals:
        code.launch("total", call, lines * parts * _THREADS, *values)
        code.launch("carry", call, lines * _THREADS, *values)
    code.launch("scan", call, lines * parts * _THREADS, *values)


class CountScan:
    """Scans counts of uint32, for kernels that need the output offset of each item.

    Args:
        kernels: The device's kernels. Compiles one, which blocks; the context is current.
    """

    def __init__(self, kernels: Kernels) -> None:
        count, total = DType.uint32, DType.uint64
        self._code = _compiled_scan(kernels, count, total, total, "sum", {"TAKE": _cast(count, total)})

    def __call__(self, call: _Call, counts: int, count: int) -> int:
        """Enqueue it; return the address of the exclusive sums, as uint64, followed by the total."""
        sums = call.workspace((count + 1) * 8)
        if count:
            _scan_rows(self._code, call, counts, sums, (1, count, 1))
        else:
            call.stream.set_bytes(sums, 0, 8)
        return sums

    def close(self) -> None:
        """Unload the code, which no longer runs. The context is current."""
        self._code.close()


class PrimitivesLibrary(CompiledLibrary):
    """Enqueues sorts, groups, selections, counts and scans."""

    def make_sorter(self, key: DType, value: DType | None, *, descending: bool) -> Sorter:
        """Make a sorter for keys of a dtype, with numbers of another dtype for each key. May block.

        Raises:
            NotSupportedError: The backend cannot sort these dtypes.
        """
        raise NotSupportedError(f"{self.name}: the {self.backend.upper()} backend does not sort")

    def _key_of(self, spec: ops.OperationSpec) -> tuple[object, ...]:
        key_function = _KEYS.get(type(spec))
        return super()._key_of(spec) if key_function is None else (type(spec), *key_function(spec))

    # ---- scans

    def plan_scan(self, spec: ops.ScanSpec, device: _Device) -> _Code:
        """Compile a scan."""
        x, out, wide = spec.x.dtype, spec.out.dtype, ops.accumulator_of(spec.out.dtype)
        return _compiled_scan(self._device.kernels, x, out, wide, spec.combine, {"TAKE": _cast(x, out, wide)})

    def scan(self, spec: ops.ScanSpec, call: _Call) -> None:
        """Combine the elements up to each one."""
        x, out, axis = spec.x, spec.out, spec.axis
        count, initial, code = x.shape[axis], int(spec.has_initial), call.plan
        inner = int(np.prod(x.shape[axis + 1 :], dtype=np.int64))
        if not out.size:
            return
        lines = out.size // out.shape[axis]
        if count <= _MAX_THREAD_LENGTH or (inner > 1 and lines >= _MIN_THREAD_LINES):
            values = call.packed(x), call.result(out), 0, lines, count, inner, 1, count, initial
            code.launch("scan_lines", call, lines, *values)
            return
        source, target = _rows(call.array(x), axis), _rows(call.array(out), axis)
        packed = target if target.is_contiguous else call.room(target)
        _scan_rows(code, call, _address(call, source), packed.address, (lines, count, initial))
        if packed is not target:
            call.convert(packed, target)

    # ---- selections

    def plan_select(self, spec: ops.SelectSpec, device: _Device) -> _Code:
        """Compile a selection."""
        flags, number, axes = spec.flags.dtype, _number(spec.flags.size), max(spec.flags.ndim, 1)
        scan = _compiled_scan(
            self._device.kernels, flags, number, number, "sum", {"TAKE": "(Acc)Cast<bool>::of((value))"}
        )
        word = 1 if spec.x is None else min(spec.x.dtype.itemsize, 8)
        defined = {"AXES": axes, "Number": register_of(number), "Word": _bits(word)}
        return _compiled(self._device.kernels, "SELECTS", defined, parts={"places": scan})

    def select(self, spec: ops.SelectSpec, call: _Call) -> None:
        """Select items, or find where they are."""
        flags, code, count = spec.flags, call.plan, call.status(spec.count)
        items, axes = flags.size, max(flags.ndim, 1)
        if not items:
            return
        positions = call.workspace(items * _number(items).itemsize)
        _scan_rows(code.parts["places"], call, call.packed(flags), positions, (1, items, 0))
        shape = flags.shape or (1,)
        if spec.x is None:
            out = [call.result(array) for array in spec.out]
            code.launch("find", call, items, 0, positions, count, items, 0, 0, *shape, *out)
            return
        words = spec.x.size // items * spec.x.dtype.itemsize // min(spec.x.dtype.itemsize, 8)
        out = [call.result(spec.out[0]), *[0] * (axes - 1)]
        values = call.packed(spec.x), positions, count, items, words, spec.is_whole, *shape, *out
        code.launch("move", call, max(items * words, 1), *values)

    # ---- order

    def plan_sort(self, spec: ops.SortSpec, device: _Device) -> _Code:
        """Compile a sort."""
        if _is_direct(spec):
            sorter = self.make_sorter(spec.x.dtype, None, descending=spec.descending)
            return self._compile_sort(spec.x, _SORT_ALONE, sorter)
        return self._compile_order(spec.x, spec.x.shape[spec.axis], descends=spec.descending)

    def _compile_order(self, x: ArraySpec, count: int, *, descends: bool) -> _Code:
        number, has_row = _number(x.size), x.size > count and x.dtype.itemsize < 8
        key = DType.uint64 if has_row or x.dtype.itemsize == 8 else DType.uint32
        sorter = self.make_sorter(key, number, descending=False)
        named = {
            "Key": register_of(key),
            "Number": register_of(number),
            "HAS_ROW": int(has_row),
            "DESCENDS": int(descends),
        }
        return self._compile_sort(x, named, sorter)

    def _compile_sort(self, x: ArraySpec, named: Mapping[str, object], sorter: Sorter) -> _Code:
        infinite = _INFINITE.get(x.dtype, 0)
        defined = {
            "Bits": _bits(x.dtype.itemsize),
            "INFINITE": f"((Bits){infinite:#x}ull)",
            "IS_FLOAT": int(x.dtype.kind == "float"),
            "IS_SIGNED": int(x.dtype.kind == "int"),
            **named,
        }
        return _compiled(self._device.kernels, "SORTS", defined, sorter=sorter)

    def sort(self, spec: ops.SortSpec, call: _Call) -> None:
        """Sort along an axis."""
        if _is_direct(spec):
            self._sort_direct(spec, call)
            return
        x = _rows(call.array(spec.x), spec.axis)
        targets = [
            None if array is None else _rows(call.array(array), spec.axis)
            for array in (spec.values, spec.indices)
        ]
        packed = [
            target if target is None or target.is_contiguous else call.room(target) for target in targets
        ]
        first_count = next(target.shape[-1] for target in packed if target is not None)
        if not (x.size and first_count):
            return
        address, count = _address(call, x), x.shape[-1]
        order, indices_per_row = self._order(call.plan, call, address, x, first_count)
        values, indices = (0 if target is None else target.address for target in packed)
        rows = x.size // count
        extents = rows, count, first_count, indices_per_row, 0
        call.plan.launch("gather", call, rows * first_count, address, 0, order, values, indices, *extents)
        for source, target in zip(packed, targets, strict=True):
            if source is not None and target is not None and source is not target:
                call.convert(source, target)

    def _order(
        self, code: _Code, call: _Call, address: int, x: DeviceArray, first_count: int
    ) -> tuple[int, int]:
        """Find the order of the first elements in each row.

        Returns:
            The address of their indices, row after row; and the number of indices in each row.
        """
        count, number = x.shape[-1], _number(x.size)
        rows, bits = x.size // count, 8 * x.dtype.itemsize
        parts = count // max(_LED, 8 * first_count)
        indices_per_row = count if parts < 2 else parts * first_count
        size = rows * indices_per_row
        has_row = rows > 1 and bits < 64
        key = 8 if has_row or bits == 64 else 4
        keys = call.workspace(size * key), call.workspace(size * key)
        order = call.workspace(size * number.itemsize), call.workspace(size * number.itemsize)
        extents = rows, count, first_count, indices_per_row, parts
        name, threads = ("encode", size) if indices_per_row == count else ("lead", rows * parts * _THREADS)
        code.launch(name, call, threads, address, keys[0], order[0], 0, 0, *extents)
        row_bits = (rows - 1).bit_length()
        assert code.sorter is not None
        buffer = code.sorter(call, keys, order, size, bits + row_bits if has_row else bits)
        if rows > 1 and not has_row:
            code.launch("rows", call, size, 0, keys[0], order[buffer], 0, 0, *extents)
            buffer ^= code.sorter(call, keys, (order[buffer], order[1 - buffer]), size, row_bits)
        return order[buffer], indices_per_row

    def _sort_direct(self, spec: ops.SortSpec, call: _Call) -> None:
        """Sort a vector by its own bits."""
        assert spec.values is not None
        out, x = call.result(spec.values), spec.x
        sorted_address = self._sorted(call.plan, call, call.packed(x), x, out)
        if sorted_address != out:
            call.stream.copy(out, sorted_address, x.size * x.dtype.itemsize)

    def _sorted(self, code: _Code, call: _Call, address: int, x: ArraySpec, out: int) -> int:
        """Sort elements without gaps by their own bits; returns where they are: at `out`, or in workspace."""
        keys = out, call.workspace(x.size * x.dtype.itemsize)
        code.launch("unify", call, x.size, address, 0, 0, out, 0, 1, x.size, 0, 0, 0)
        assert code.sorter is not None
        return keys[code.sorter(call, keys, None, x.size, 8 * x.dtype.itemsize) if x.size else 0]

    # ---- groups

    def plan_group(self, spec: ops.GroupSpec, device: _Device) -> _Code:
        """Compile a search for groups."""
        x, number, parts = spec.x.dtype, _number(spec.x.size), dict[str, _Code]()
        # Begin with the parts that may be refused, because code loaded before a refusal would stay loaded.
        if spec.is_sorted:
            if x not in SORTED_DTYPES:
                raise NotSupportedError(
                    f"{self.name}: the {self.backend.upper()} backend does not sort {x}", backend=self.backend
                )
            if _needs_no_order(spec):
                sorter = self.make_sorter(x, None, descending=False)
                parts["order"] = self._compile_sort(spec.x, _SORT_ALONE, sorter)
            else:
                parts["order"] = self._compile_order(spec.x, max(spec.x.size, 1), descends=False)
        kernels, defined = self._device.kernels, {**_types(In=x), "Number": register_of(number)}
        parts["places"] = _compiled_scan(kernels, x, number, number, "sum", {"GROUPS": "1"})
        return _compiled(kernels, "GROUPS_PUT", defined, parts=parts)

    def group(self, spec: ops.GroupSpec, call: _Call) -> None:
        """Find groups of equal elements."""
        code, size, count = call.plan, spec.x.size, call.status(spec.count)
        if not size:
            return
        x = DeviceArray.packed(call.packed(spec.x), spec.x.dtype, (size,))
        order, ordered = 0, x.address
        if spec.is_sorted:
            sorts, ordered = code.parts["order"], call.workspace(x.nbytes)
            if _needs_no_order(spec):
                ordered = self._sorted(sorts, call, x.address, spec.x, ordered)
            else:
                order, _ = self._order(sorts, call, x.address, x, size)
                sorts.launch("gather", call, size, x.address, 0, order, ordered, 0, 1, size, size, size, 0)
        positions, starts = call.workspace(size * _number(size).itemsize), call.workspace(size * 8)
        _scan_rows(code.parts["places"], call, ordered, positions, (1, size, 0))
        optional_addresses = [
            0 if array is None else call.result(array) for array in (spec.indices, spec.inverse, spec.counts)
        ]
        values = ordered, order, positions, call.result(spec.values), starts, *optional_addresses, count, size
        code.launch("group", call, size, *values)
        if spec.counts is not None:
            code.launch("lengths", call, size, *values)

    # ---- searches and counts

    def plan_search(self, spec: ops.SearchSpec, device: _Device) -> _Code:
        """Compile a search."""
        sorter = DType.int64 if spec.sorter is None else spec.sorter.dtype
        defined = {**_compared(spec.x.dtype, spec.edges.dtype), **_types(Sorter=sorter)}
        return _compiled(self._device.kernels, "SEARCHES", defined)

    def search(self, spec: ops.SearchSpec, call: _Call) -> None:
        """Find where values are to be inserted."""
        fault, sorter = call.status(spec.fault), 0 if spec.sorter is None else call.packed(spec.sorter)
        addresses = call.packed(spec.edges), call.packed(spec.x), sorter, call.result(spec.out), fault
        thread_count = max(spec.x.size, spec.edges.size if sorter else 0)
        extents = spec.edges.size, spec.x.size, spec.side == "right"
        call.plan.launch("search", call, thread_count, *addresses, *extents)

    def plan_count(self, spec: ops.CountSpec, device: _Device) -> _Code:
        """Compile a count."""
        x = spec.x.dtype
        optional_inputs = {"EDGES": spec.edges, "WEIGHTS": spec.weights, "BOUNDS": spec.bounds or None}
        named = {f"HAS_{key}": int(value is not None) for key, value in optional_inputs.items()}
        edges = x if spec.edges is None else spec.edges.dtype
        return _compiled(self._device.kernels, "COUNTS", {**_compared(x, edges), **named})

    def count(self, spec: ops.CountSpec, call: _Call) -> None:
        """Count the elements of bins."""
        fault, out = call.status(spec.fault), call.result(spec.out)
        if not spec.out.size:
            return
        call.stream.set_bytes(out, 0, spec.out.size * 8)
        edges, weights = (0 if array is None else call.packed(array) for array in (spec.edges, spec.weights))
        # The kernel has the bounds in the dtype of the elements.
        bounds = np.array(spec.bounds or (0, 0), spec.x.dtype.dtype if spec.bounds else None).view(np.int64)
        extents = spec.out.size, spec.x.size, *bounds.tolist()
        values = edges, call.packed(spec.x), weights, out, fault, *extents
        call.plan.launch("count", call, spec.x.size, *values)

    # ---- segments

    def plan_segments(self, spec: ops.SegmentSpec, device: _Device) -> _Code:
        """Compile a reduction of segments."""
        x, out = spec.x.dtype, spec.out.dtype
        wide = ops.accumulator_of(out) if spec.combine in ops.IDENTITIES else out
        defined = {
            **_types(In=x, Out=out, Offset=spec.offsets.dtype),
            "Acc": register_of(wide),
            "COMBINE": _COMBINE[spec.combine],
            "IDENTITY": cast_of(str(ops.IDENTITIES.get(spec.combine, 0)), DType.int32, wide),
            "HAS_NO_IDENTITY": int(spec.combine not in ops.IDENTITIES),
            "TAKE": _cast(x, out, wide),
            "GIVE": _cast(wide, out),
        }
        return _compiled(self._device.kernels, "SEGMENTS", defined)

    def combine_segments(self, spec: ops.SegmentSpec, call: _Call) -> None:
        """Combine segments."""
        fault, out = call.status(spec.fault), call.result(spec.out)
        values = call.packed(spec.x), call.packed(spec.offsets), out, fault, spec.x.size, spec.out.size
        call.plan.launch("segment", call, spec.out.size * _THREADS, *values)


_SORT_ALONE = {"Key": "u64", "Number": "u32", "HAS_ROW": 0, "DESCENDS": 0}
# float16, bfloat16 and truth values are sorted by keys.
_INDIRECT = {DType.float16, DType.bfloat16, DType.bool}


def _is_direct(spec: ops.SortSpec) -> bool:
    """Return whether a vector is sorted by its own bits, so that keys need no numbers."""
    return spec.indices is None and spec.x.ndim == 1 and spec.x.dtype not in _INDIRECT


def _needs_no_order(spec: ops.GroupSpec) -> bool:
    """Return whether groups are found by sorting values by their own bits, because equal values are alike."""
    needs_places = spec.indices is not None or spec.inverse is not None
    return not needs_places and spec.x.dtype.kind in ("int", "uint") and spec.x.dtype not in _INDIRECT


def _rows(array: DeviceArray, axis: int) -> DeviceArray:
    """See an axis as the last one."""

    def moved(extents: Ints) -> Ints:
        return (*extents[:axis], *extents[axis + 1 :], extents[axis])

    return DeviceArray(array.address, array.dtype, moved(array.shape), moved(array.strides))


def _address(call: _Call, array: DeviceArray) -> int:
    """Return the address of the elements without gaps."""
    return array.address if array.is_contiguous else call.copy_of(array).address


def _compared(x: DType, edges: DType) -> dict[str, str]:
    """Define the types in which values are compared with edges: one, unless that rounds integers."""
    wide = DType.of(np.result_type(x.dtype, edges.dtype))
    types = [wide, wide]
    if wide.is_inexact and any(dtype in (DType.int64, DType.uint64) for dtype in (x, edges)):
        types = [
            DType.float64 if dtype.is_inexact else DType.uint64 if dtype is DType.uint64 else DType.int64
            for dtype in (x, edges)
        ]
    return {**_types(X=x, Edge=edges), "FROM_X": _cast(x, types[0]), "FROM_EDGE": _cast(edges, types[1])}


def _dtype(array: ArraySpec | None) -> DType | None:
    return None if array is None else array.dtype


def _sort_key(spec: ops.SortSpec) -> tuple[object, ...]:
    count = spec.x.shape[spec.axis]
    return _is_direct(spec), spec.descending, spec.x.dtype, spec.x.size < _NARROW, spec.x.size > count


# Code is for types, whatever the extents are.
_KEYS: Mapping[type[Any], Callable[[Any], tuple[object, ...]]] = {
    ops.ScanSpec: lambda spec: (spec.combine, spec.x.dtype, spec.out.dtype),
    ops.SelectSpec: lambda spec: (
        spec.flags.dtype,
        spec.flags.ndim,
        spec.flags.size < _NARROW,
        spec.x and spec.x.dtype.itemsize,
    ),
    ops.SortSpec: _sort_key,
    ops.GroupSpec: lambda spec: (spec.is_sorted, spec.x.dtype, spec.x.size < _NARROW, _needs_no_order(spec)),
    ops.SearchSpec: lambda spec: (spec.x.dtype, spec.edges.dtype, _dtype(spec.sorter)),
    ops.CountSpec: lambda spec: (spec.x.dtype, _dtype(spec.edges), _dtype(spec.weights), bool(spec.bounds)),
    ops.SegmentSpec: lambda spec: (spec.combine, spec.x.dtype, spec.out.dtype, spec.offsets.dtype),
}


@functools.cache
def _source() -> str:
    return _SOURCE.read_text(encoding="utf-8")
