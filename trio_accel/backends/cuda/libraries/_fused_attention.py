"""Attention by one kernel of cuDNN; what it has none for is left to products of matrices."""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs

from ...base import DType
from ...base.contract.device_array import DeviceArray, broadcast
from ...base.contract.ops import ArraySpec, AttentionGradSpec, AttentionSpec, OperationSpec
from ...base.kit.kernels import kernel
from ..kit._library import KernelCall, LibraryDevice
from ._attention import Attention, AttentionKernels, Lengths, Sizes
from ._cudnn import Graph, Layout
from ._dnn_base import FLOATS, aligned, aligned_result, is_aligned

__all__ = ["AttentionLibrary"]

# Lengths that are no multiples of it are told to the gradient: else it has been seen to make NaNs of them
# (https://github.com/NVIDIA/cudnn-frontend/issues/160).
_TILE = 128
# Elements of halves that are read at once.
_EIGHT = 8
# The code of minus infinity.
_INFINITE = {DType.float16: 0xFC00, DType.bfloat16: 0xFF80}

# As in dnn.cu.
_ARRAYS = "query", "key", "value", "grad", "out", "mask", "grad_query", "grad_key", "grad_value"

_Spec: TypeAlias = AttentionSpec | AttentionGradSpec


@attrs.frozen(eq=False)
class _Plan:
    """How an attention is computed.

    Attributes:
        graph: cuDNN's graph; None for products of matrices.
        has_lengths: Whether the graph is told lengths.
        mask: Shape of what the graph adds to the scores; None for nothing.
        numbers: Strides and extents, for the kernel that looks at what the graph has made.
    """

    graph: Graph | None = None
    has_lengths: bool = False
    mask: tuple[int, ...] | None = None
    numbers: tuple[float, ...] = ()


class AttentionLibrary(AttentionKernels):
    """Attention, and its gradients."""

    def _key_of(self, spec: OperationSpec) -> tuple[object, ...]:
        key = super()._key_of(spec)
        # A graph has the factor in it.
        return (*key, spec.scale) if isinstance(spec, (AttentionSpec, AttentionGradSpec)) else key

    def _plan_attention(self, spec: _Spec, device: LibraryDevice) -> _Plan:
        plan = self._fused(spec)
        if plan is None:
            self._load_products(spec.query.dtype)
            return _Plan()
        self._load_checks()
        return plan

    def _fused(self, spec: _Spec) -> _Plan | None:
        """Build cuDNN's graph; None where it has no kernel, or none that is right."""
        sizes, is_grad = Sizes.of(spec), isinstance(spec, AttentionGradSpec)
        # It takes float32 without refusing it, and reads where there is nothing; and factors that are not
        # above 0, and is wrong.
        is_left = (
            not spec.query.dtype.is_half
            or spec.scale <= 0
            or not all((sizes.batches, sizes.lines, sizes.columns, sizes.e, sizes.f))
        )
        has_lengths = spec.query_lengths is not None or spec.key_lengths is not None
        # Its gradients of rows that see no key, and of masked ones, have been seen to be NaN.
        if is_left or (is_grad and (has_lengths or spec.mask is not None)):
            return None
        if spec.mask is not None and len(sizes.stack) > 1:
            return None
        cudnn = self._find_cudnn()
        if cudnn is None:
            return None
        if is_grad:
            has_lengths = bool(sizes.rows % _TILE or sizes.columns % _TILE)
        plan = _Plan(None, has_lengths, _mask_shape(spec, sizes))
        layouts = self._layouts(spec, sizes, plan)
        outputs = ["grad_query", "grad_key", "grad_value"] if is_grad else ["out"]
        if isinstance(spec, AttentionSpec) and spec.lse is not None:
            outputs.append("lse")

        def describe(graph: Any, tensors: dict[str, Any]) -> list[Any]:
            return _describe(cudnn.front, spec, graph, tensors)

        graph = cudnn.build(layouts, outputs, describe, is_exact=False)
        if graph is None:
            return None
        return attrs.evolve(plan, graph=graph, numbers=_numbers(spec, sizes, layouts))

    def _layouts(self, spec: _Spec, sizes: Sizes, plan: _Plan) -> dict[str, Layout]:
        """Return the layouts of all arrays of a graph, those that are written last."""
        n, heads, rows = sizes.sequences, sizes.heads, sizes.rows
        keys = n, sizes.served, sizes.columns
        made: dict[str, Layout] = {"query": _layout(spec.query, (n, heads, rows, sizes.e))}
        for name, array, width in (("key", spec.key, sizes.e), ("value", spec.value, sizes.f)):
            # Those that have lengths are copied.
            is_copied = spec.key_lengths is not None
            made[name] = (
                Layout.packed(array.dtype, (*keys, width)) if is_copied else _layout(array, (*keys, width))
            )
        if plan.has_lengths:
            for name in ("query_lengths", "key_lengths"):
                made[name] = Layout.packed(DType.int32, (n, 1, 1, 1))
        if plan.mask is not None:
            steps = Layout.packed(spec.query.dtype, _padded(plan.mask)).strides
            made["mask"] = Layout(spec.query.dtype, plan.mask, steps)
        logs = Layout.packed(DType.float32, (n, heads, rows, 1))
        if isinstance(spec, AttentionSpec):
            made["out"] = _layout(spec.out, (n, heads, rows, sizes.f))
            return made if spec.lse is None else made | {"lse": logs}
        made["grad"] = _layout(spec.grad, (n, heads, rows, sizes.f))
        made["out"] = _layout(spec.out, (n, heads, rows, sizes.f))
        made["lse"] = logs
        for name in ("query", "key", "value"):
            made[f"grad_{name}"] = Layout.packed(spec.query.dtype, made[name].shape)
        return made

    @kernel(AttentionSpec, backend="cuda", dtypes={"query": FLOATS}, plan=_plan_attention)
    def _attention(self, spec: AttentionSpec, call: KernelCall) -> None:
        plan: _Plan = call.plan
        if plan.graph is None:
            self._compute_attention(spec, call)
            return
        addresses = {"query": _in_place(call, spec.query)}
        # To look at an attention without lengths would take as long as to launch it.
        of = Attention(self, spec, call) if plan.has_lengths else None
        lengths = Lengths() if of is None else of.lengths
        for name, array in (("key", spec.key), ("value", spec.value)):
            addresses[name] = (
                _in_place(call, array)
                if of is None or not lengths.key
                else of.gathered(array, lengths.key, lengths.table, of.sizes.columns).address
            )
        if of is not None:
            addresses |= self._told_lengths(call, of.sizes, lengths.query, lengths.key)
        if plan.mask is not None and spec.mask is not None:
            addresses["mask"] = self._bias(call, spec.mask, spec.query.dtype, plan.mask)
        addresses["lse"] = 0 if spec.lse is None else call.result(spec.lse)
        with aligned_result(call, spec.out, is_direct=_is_direct(spec.out)) as out:
            self._run_plan(plan, plan.graph, call, addresses | {"out": out}, lengths)

    @kernel(AttentionGradSpec, backend="cuda", dtypes={"query": FLOATS}, plan=_plan_attention)
    def _attention_grad(self, spec: AttentionGradSpec, call: KernelCall) -> None:
        plan: _Plan = call.plan
        if plan.graph is None:
            self._compute_attention_grad(spec, call)
            return
        addresses = {
            name: _in_place(call, getattr(spec, name)) for name in ("query", "key", "value", "grad", "out")
        }
        addresses["lse"] = aligned(call, spec.lse)
        if plan.has_lengths:
            addresses |= self._told_lengths(call, Sizes.of(spec), 0, 0)
        # They are new, and so without gaps.
        for name in ("grad_query", "grad_key", "grad_value"):
            addresses[name] = call.at(getattr(spec, name))
        self._run_plan(plan, plan.graph, call, addresses, Lengths())

    def _run_plan(
        self, plan: _Plan, graph: Graph, call: KernelCall, addresses: dict[str, int], lengths: Lengths
    ) -> None:
        """Enqueue a graph, and what makes rows anew in which it has multiplied what is hidden."""
        self._run_graph(graph, call, addresses)
        arrays = (addresses.get(name, 0) for name in (*_ARRAYS, "lse"))
        numbers, count = plan.numbers, int(plan.numbers[3 * len(_ARRAYS)])
        self.launch("attention_fused", call, count, *arrays, lengths.query, lengths.key, *numbers)

    def _told_lengths(self, call: KernelCall, sizes: Sizes, query: int, key: int) -> dict[str, int]:
        """Return addresses of lengths, and of the extents where none are given."""
        found: dict[str, int] = {}
        for name, address, most in (
            ("query_lengths", query, sizes.rows),
            ("key_lengths", key, sizes.columns),
        ):
            room = address or call.workspace(4 * sizes.sequences)
            if not address:
                call.fill(DeviceArray.packed(room, DType.int32, (sizes.sequences,)), most)
            found[name] = room
        return found

    def _bias(self, call: KernelCall, mask: ArraySpec, dtype: DType, shape: tuple[int, ...]) -> int:
        """Return the address of what is added to scores."""
        given = call.array(mask)
        above = (*(1,) * (4 - mask.ndim), *mask.shape) if mask.ndim < 4 else mask.shape
        wanted = broadcast(
            DeviceArray(given.address, mask.dtype, above, (*(0,) * (4 - mask.ndim), *given.strides)), shape
        )
        # Rows begin where several elements can be read at once.
        room = call.workspace_array(mask.dtype, _padded(shape))
        call.convert(wanted, DeviceArray(room.address, mask.dtype, shape, room.strides))
        if mask.dtype is not DType.bool:
            return room.address
        made = call.workspace_array(dtype, room.shape)
        values = room.address, made.address, room.size, _INFINITE[dtype]
        self.launch("mask_to_bias", call, room.size, *values)
        return made.address


def _padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // _EIGHT) * _EIGHT)


def _mask_shape(spec: _Spec, sizes: Sizes) -> tuple[int, ...] | None:
    """Return the shape of what is added to scores: sequences and heads may be one for all."""
    if spec.mask is None:
        return None
    shape = (*(1,) * (len(sizes.stack) + 3 - spec.mask.ndim), *spec.mask.shape)
    above = 1 if all(extent == 1 for extent in shape[:-3]) else sizes.sequences
    return (above, shape[-3], sizes.rows, sizes.columns)


def _numbers(spec: _Spec, sizes: Sizes, layouts: dict[str, Layout]) -> tuple[float, ...]:
    """Return strides and extents as `FusedArguments` has them in dnn.cu."""
    steps: list[int] = []
    for layout in map(layouts.get, _ARRAYS):
        shape, strides = ((1, 1, 1), (0, 0, 0)) if layout is None else (layout.shape, layout.strides)
        # An axis of one element is there for all: the mask's.
        steps += [0 if extent == 1 else step for extent, step in zip(shape[:3], strides[:3], strict=True)]
    queries, keys = sizes.batches * sizes.lines, sizes.batches * sizes.columns
    is_grad = isinstance(spec, AttentionGradSpec)
    return (
        *(*steps, queries + 2 * keys if is_grad else queries, queries, keys, sizes.heads),
        *(sizes.heads // sizes.served, sizes.rows, sizes.columns, sizes.e, sizes.f, spec.left, spec.right),
        *(spec.alignment == "lower_right", is_grad, _INFINITE[spec.query.dtype], spec.scale),
    )


def _describe(front: Any, spec: _Spec, graph: Any, tensors: dict[str, Any]) -> list[Any]:
    """Add the node to a graph."""
    options: dict[str, Any] = {"attn_scale": spec.scale}
    if spec.alignment == "lower_right" and (spec.left >= 0 or spec.right >= 0):
        options["diagonal_alignment"] = front.diagonal_alignment.BOTTOM_RIGHT
    if spec.left >= 0:
        # The first key that is not seen.
        options["diagonal_band_left_bound"] = spec.left + 1
    if spec.right >= 0:
        options["diagonal_band_right_bound"] = spec.right
    if "query_lengths" in tensors:
        options |= {
            "use_padding_mask": True,
            "seq_len_q": tensors["query_lengths"],
            "seq_len_kv": tensors["key_lengths"],
        }
    if "mask" in tensors:
        options["bias"] = tensors["mask"]
    given = {"q": tensors["query"], "k": tensors["key"], "v": tensors["value"]}
    if isinstance(spec, AttentionSpec):
        out, logs = graph.sdpa(**given, generate_stats=spec.lse is not None, **options)
        return [out] if spec.lse is None else [out, logs]
    more = {"o": tensors["out"], "dO": tensors["grad"], "stats": tensors["lse"]}
    return list(graph.sdpa_backward(**given, **more, **options))


def _is_direct(array: ArraySpec) -> bool:
    """Tell whether cuDNN takes an array as it lies: elements side by side, and rows where they begin well."""
    size = array.dtype.itemsize
    return (
        array.ndim <= 4
        and is_aligned(array)
        and array.strides[-1] == size
        and all(
            step > 0 and step % 16 == 0
            for step, extent in zip(array.strides[:-1], array.shape[:-1], strict=True)
            if extent > 1
        )
    )


def _strides(array: ArraySpec) -> tuple[int, ...]:
    """Return the bytes between elements along four axes, of an array that is taken as it lies."""
    missing = 4 - array.ndim
    return (*(0,) * missing, *array.strides)


def _layout(array: ArraySpec, shape: tuple[int, ...]) -> Layout:
    """Return the layout of an array as it lies, or without gaps."""
    if not _is_direct(array):
        return Layout.packed(array.dtype, shape)
    packed = Layout.packed(array.dtype, shape).strides
    steps = [step // array.dtype.itemsize for step in _strides(array)]
    # Of an axis of one element, the step may be anything.
    found = [own if extent > 1 else other for own, other, extent in zip(steps, packed, shape, strict=True)]
    return Layout(array.dtype, shape, tuple(found))


def _in_place(call: KernelCall, array: ArraySpec) -> int:
    """Return the address of an array as its layout has it."""
    return call.at(array) if _is_direct(array) else aligned(call, array)
