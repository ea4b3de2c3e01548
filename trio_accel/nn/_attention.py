"""Attention of queries over keys: forward, its gradients, and over keys in blocks.

All are planned by hand, because no line of shapes expresses that a head of the keys serves several query
heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, overload

from ..backends.base import DType, Ints, NotSupportedError
from ..backends.base.contract.ops import Alignment, ArraySpec, AttentionGradSpec, AttentionSpec, common_shape
from ..devices import (
    AccelRef,
    Call,
    Operand,
    Operation,
    Planned,
    Planner,
    bounded_integer,
    message_of,
    operation,
)
from ..expressions import Out
from ._library import MAX_INT32, DnnActor, check_dtypes, check_shape

__all__ = [
    "AttentionGradResult",
    "AttentionResult",
    "ScaledDotProductAttention",
    "paged_attention",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_grad",
]

_Numbers: TypeAlias = tuple[int, int, Alignment, float]


class AttentionResult(NamedTuple):
    """The result of an attention, with the values for its gradients; see `scaled_dot_product_attention`."""

    output: AccelRef
    """Means of the values."""
    logsumexp: AccelRef
    """For each query the logarithm of the sum of exponentials of its scores, at least float32."""


class AttentionGradResult(NamedTuple):
    """Gradients of an attention; see `scaled_dot_product_attention_grad`."""

    query: AccelRef
    """For the queries."""
    key: AccelRef
    """For the keys."""
    value: AccelRef
    """For the values."""


def _check_heads(
    name: str, query: ArraySpec, key: ArraySpec, value: ArraySpec, *, enable_gqa: object
) -> None:
    """Require queries, keys and values that fit, of which the leading axes are the same but for the heads."""
    shapes = f"query {query.shape}, key {key.shape} and value {value.shape}"
    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise ValueError(f"{name}: arrays must have at least two axes, got {shapes}")
    if not query.shape[-1] == key.shape[-1] or not key.shape[-1]:
        raise ValueError(f"{name}: query and key must have the same last axis, with an element, got {shapes}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"{name}: key and value must have the same axes but for the last one, got {shapes}")
    if enable_gqa and min(query.ndim, key.ndim) > 2 and query.shape[:-3] == key.shape[:-3]:
        heads, served = query.shape[-3], key.shape[-3]
        if heads % served if served else heads:
            raise ValueError(f"{name}: the heads of key must divide those of query, got {shapes}")
    elif query.shape[:-2] != key.shape[:-2]:
        hint = "" if enable_gqa else "; enable_gqa=True shares the heads of key out among those of query"
        raise ValueError(f"{name}: query and key must have the same leading axes, got {shapes}{hint}")


def _check_numbers(name: str, message: Any, query: ArraySpec) -> _Numbers:
    """Check which keys a query sees, the place of its own, and the factor; see `AttentionSpec`."""
    window, scale = message.window_size, message.scale
    is_pair = type(window) in (tuple, list) and len(window) == 2
    if not is_pair or not all(type(side) is int and side >= -1 for side in window):
        raise ValueError(f"{name}: window_size must be two integers of at least -1, got {window!r}")
    # No sequence is longer, and libraries add to it.
    window_left, window_right = (
        min(bounded_integer(name, "window_size", side), MAX_INT32 - 1) for side in window
    )
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    elif isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"{name}: scale must be a finite number or None, got {scale!r}")
    alignment: Alignment = getattr(message, "causal_alignment", "lower_right")
    return window_left, 0 if message.is_causal else window_right, alignment, float(scale)


def _read_wholes(planner: Planner, argument: str, operand: Operand) -> ArraySpec:
    """Take an array of integers."""
    array = planner.read(argument, operand)
    if array.dtype not in (DType.int32, DType.int64):
        raise TypeError(f"{planner.name}: {argument} must be int32 or int64, got {array.dtype}")
    return array


def _read_lengths(planner: Planner, argument: str, lengths: Operand, shape: Ints) -> ArraySpec:
    """Take lengths of this shape."""
    array = _read_wholes(planner, argument, lengths)
    check_shape(planner.name, argument, array, shape)
    return array


def _read_mask(planner: Planner, message: Any, query: ArraySpec, key: ArraySpec) -> ArraySpec | None:
    if message.attn_mask is None:
        return None
    mask = planner.read("attn_mask", message.attn_mask)
    if mask.dtype not in (DType.bool, query.dtype):
        raise TypeError(f"{planner.name}: attn_mask must be bool or {query.dtype}, got {mask.dtype}")
    shape = (*query.shape[:-1], key.shape[-2])
    if common_shape(mask.shape, shape) != shape:
        raise ValueError(f"{planner.name}: attn_mask must broadcast to {shape}, got {mask.shape}")
    return mask


def _read(
    planner: Planner, message: Any, **extra_arrays: Operand
) -> tuple[list[ArraySpec], _Numbers, tuple[ArraySpec | None, ArraySpec | None, ArraySpec | None]]:
    """Take what attention and its gradients have in common.

    Returns:
        The arrays of `extra_arrays`, and queries, keys and values; then numbers; then mask and lengths.
    """
    name = planner.name
    operands = {**extra_arrays, "query": message.query, "key": message.key, "value": message.value}
    arrays = {argument: planner.read(argument, array) for argument, array in operands.items()}
    check_dtypes(planner, **arrays)
    query, key, value = list(arrays.values())[-3:]
    _check_heads(name, query, key, value, enable_gqa=message.enable_gqa)
    numbers = _check_numbers(name, message, query)
    lengths = {"query_lengths": message.query_lengths, "key_lengths": message.key_lengths}
    of_query, of_key = (
        None if array is None else _read_lengths(planner, argument, array, query.shape[:-3])
        for argument, array in lengths.items()
    )
    return list(arrays.values()), numbers, (_read_mask(planner, message, query, key), of_query, of_key)


def _log_dtype(dtype: DType) -> DType:
    return DType.float32 if dtype.is_half else dtype


def _plan_attention(message: Any, planner: Planner) -> Planned[Any]:
    name = planner.name
    if message.dropout_p != 0:
        raise NotSupportedError(
            f"{name}: dropout is not supported: dropout_p must be 0, got {message.dropout_p!r}"
        )
    (query, key, value), numbers, mask_and_lengths = _read(planner, message)
    out = planner.output((*query.shape[:-1], value.shape[-1]), query.dtype, message.out)
    if message.out is not None:
        named = zip(("attn_mask", "query_lengths", "key_lengths"), mask_and_lengths, strict=True)
        mask_arrays = {argument: array for argument, array in named if array is not None}
        planner.distinct("out", out.spec, query=query, key=key, value=value, **mask_arrays)
    lse = planner.output(query.shape[:-1], _log_dtype(query.dtype)) if message.return_lse else None
    result_specs = out.spec, None if lse is None else lse.spec
    spec = AttentionSpec(*numbers, query, key, value, *mask_and_lengths, None, *result_specs)
    return Planned(spec, out if lse is None else AttentionResult(out, lse), is_checked=True)


@overload
def scaled_dot_product_attention(
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: Operand | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_alignment: Alignment = "upper_left",
    window_size: tuple[int, int] = (-1, -1),
    query_lengths: Operand | None = None,
    key_lengths: Operand | None = None,
    return_lse: Literal[False] = False,
    out: Out = None,
) -> Call[AccelRef]: ...
@overload
def scaled_dot_product_attention(
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: Operand | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_alignment: Alignment = "upper_left",
    window_size: tuple[int, int] = (-1, -1),
    query_lengths: Operand | None = None,
    key_lengths: Operand | None = None,
    return_lse: Literal[True],
    out: Out = None,
) -> Call[AttentionResult]: ...
@operation(actor=DnnActor, plan=_plan_attention)
async def scaled_dot_product_attention(
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: Operand | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_alignment: Alignment = "upper_left",
    window_size: tuple[int, int] = (-1, -1),
    query_lengths: Operand | None = None,
    key_lengths: Operand | None = None,
    return_lse: bool = False,
    out: Out = None,
) -> AccelRef | AttentionResult:
    """Compute ``softmax(query @ key^T * scale) @ value`` as `torch.nn.functional` does.

    Scores are in memory for some rows of one head at a time. A query without keys gets zeros, and minus
    infinity as its logarithm. Masks, bands and lengths may be combined: a key counts if all of them allow it.
    A key with weight zero adds nothing, even if it or its value is infinite or NaN.

    Args:
        query: Array of shape (..., heads, rows, e), of float16, bfloat16, float32 or float64.
        key: Array of shape (..., heads, columns, e), of the same dtype.
        value: Array of shape (..., heads, columns, f), of the same dtype.
        attn_mask: Array that broadcasts to (..., heads, rows, columns). Truth values: whether a key counts.
            An array with the dtype of `query` is added to the scores; minus infinity hides a key.
        dropout_p: Must be 0, because dropout is not supported.
        is_causal: Whether each query only sees its own key and earlier ones.
        scale: Factor of the products; None for ``1 / sqrt(e)``.
        enable_gqa: Whether a head of `key` and `value` may serve several consecutive heads of `query`.
        causal_alignment: Which key is a query's own. ``"upper_left"``: the key with the same number, as in
            PyTorch. ``"lower_right"``: the last query has the last key, for use with cached earlier keys.
        window_size: The number of keys before and after its own that a query sees; -1 for all.
        query_lengths: Array of shape (...), int32 or int64: the number of rows that count. The results of
            other rows are zeros.
        key_lengths: Likewise, the number of columns that count. Other columns are ignored.
        return_lse: Whether to return the logarithms also, for `scaled_dot_product_attention_grad`.
        out: Array to write to.

    Returns:
        The result, of shape (..., heads, rows, f); with `return_lse` an `AttentionResult`.

    Raises:
        TypeError: Dtypes differ, or are not among these.
        ValueError: Shapes that do not fit, a mask of another shape, an option that there is not, or `out` has
            another shape or dtype, or shares memory with an argument.
        OutOfRangeError: A length is negative, or larger than the array.
        NotSupportedError: `dropout_p` is not 0.
    """
    ...


def _plan_attention_grad(message: Any, planner: Planner) -> Planned[AttentionGradResult]:
    (grad, output, query, key, value), numbers, mask_and_lengths = _read(
        planner, message, grad_output=message.grad_output, output=message.output
    )
    lse = planner.read("logsumexp", message.logsumexp)
    shape = (*query.shape[:-1], value.shape[-1])
    for argument, array, expected_shape in (
        ("grad_output", grad, shape),
        ("output", output, shape),
        ("logsumexp", lse, shape[:-1]),
    ):
        check_shape(planner.name, argument, array, expected_shape)
    if lse.dtype is not _log_dtype(query.dtype):
        raise TypeError(
            f"{planner.name}: logsumexp must have dtype {_log_dtype(query.dtype)}, got {lse.dtype}"
        )
    gradients = AttentionGradResult(
        *[planner.output(operand.shape, operand.dtype) for operand in (query, key, value)]
    )
    written = gradients.query.spec, gradients.key.spec, gradients.value.spec
    spec = AttentionGradSpec(*numbers, grad, query, key, value, output, lse, *mask_and_lengths, *written)
    return Planned(spec, gradients, is_checked=True)


@operation(actor=DnnActor, plan=_plan_attention_grad)
async def scaled_dot_product_attention_grad(
    grad_output: Operand,
    query: Operand,
    key: Operand,
    value: Operand,
    output: Operand,
    logsumexp: Operand,
    attn_mask: Operand | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_alignment: Alignment = "upper_left",
    window_size: tuple[int, int] = (-1, -1),
    query_lengths: Operand | None = None,
    key_lengths: Operand | None = None,
) -> AttentionGradResult:
    """Compute the gradients of an attention for queries, keys and values.

    The scores are computed again, for some rows of one head at a time (Dao et al., FlashAttention; NeurIPS
    2022). The mask does not get a gradient.

    Args:
        grad_output: The gradient for the result, with its shape.
        query: See `scaled_dot_product_attention`, as for all arguments without a description here.
        key: The keys.
        value: The values.
        output: The result.
        logsumexp: Its logarithms, from `return_lse`.
        attn_mask: The mask.
        is_causal: Whether each query only sees its own key and earlier ones.
        scale: Factor of the products.
        enable_gqa: Whether a head of `key` and `value` may serve several heads of `query`.
        causal_alignment: Which key is a query's own.
        window_size: The number of keys before and after its own that a query sees.
        query_lengths: The number of rows that count.
        key_lengths: The number of columns that count.

    Returns:
        The gradients, with the shapes of `query`, `key` and `value`.

    Raises:
        TypeError, ValueError, OutOfRangeError: As of `scaled_dot_product_attention`.
    """
    ...


def _plan_paged(message: Any, planner: Planner) -> Planned[AccelRef]:
    name = planner.name
    operands = {"query": message.query, "key_cache": message.key_cache, "value_cache": message.value_cache}
    arrays = {argument: planner.read(argument, array) for argument, array in operands.items()}
    check_dtypes(planner, **arrays)
    query, key, value = arrays.values()
    shapes = f"query {query.shape}, key_cache {key.shape} and value_cache {value.shape}"
    if {query.ndim, key.ndim, value.ndim} != {4} or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{name}: query must be (n, heads, rows, e), key_cache and value_cache (blocks, kv_heads, block, "
            f"...), got {shapes}"
        )
    if query.shape[3] != key.shape[3] or 0 in key.shape[1:]:
        raise ValueError(f"{name}: query and key_cache must have the same last axis, got {shapes}")
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{name}: the heads of key_cache must divide those of query, got {shapes}")
    table = _read_wholes(planner, "block_table", message.block_table)
    if table.ndim != 2 or table.shape[0] != query.shape[0]:
        raise ValueError(f"{name}: block_table must have shape ({query.shape[0]}, most), got {table.shape}")
    lengths = _read_lengths(planner, "key_lengths", message.key_lengths, query.shape[:1])
    numbers = _check_numbers(name, message, query)
    out = planner.output((*query.shape[:3], value.shape[3]), query.dtype, message.out)
    if message.out is not None:
        planner.distinct("out", out.spec, query=query, key_cache=key, value_cache=value)
    spec = AttentionSpec(*numbers, query, key, value, None, None, lengths, table, out.spec, None)
    return Planned(spec, out, is_checked=True)


@operation(actor=DnnActor, plan=_plan_paged)
async def paged_attention(
    query: Operand,
    key_cache: Operand,
    value_cache: Operand,
    block_table: Operand,
    key_lengths: Operand,
    is_causal: bool = True,
    scale: float | None = None,
    *,
    window_size: tuple[int, int] = (-1, -1),
    out: AccelRef | None = None,
) -> AccelRef:
    """Compute an attention over keys and values stored in blocks (Kwon et al., PagedAttention; 2023).

    The queries are the last of their sequence: query i of m has key ``length - m + i`` as its own.

    Args:
        query: Array of shape (n, heads, rows, e), of float16, bfloat16, float32 or float64.
        key_cache: Blocks of shape (blocks, kv_heads, block, e), of the same dtype. Each head serves an equal
            number of consecutive heads of `query`.
        value_cache: Blocks of shape (blocks, kv_heads, block, f).
        block_table: Array of shape (n, most), int32 or int64: the blocks with the keys of each sequence, in
            order. Blocks after its length are ignored.
        key_lengths: Array of shape (n,), int32 or int64: the number of keys.
        is_causal: Whether each query only sees its own key and earlier ones.
        scale: Factor of the products; None for ``1 / sqrt(e)``.
        window_size: The number of keys before and after its own that a query sees; -1 for all.
        out: Array to write to.

    Returns:
        The result, of shape (n, heads, rows, f).

    Raises:
        TypeError, ValueError: As of `scaled_dot_product_attention`.
        OutOfRangeError: A length is negative, or exceeds the blocks of a row; or a block does not exist. Both
            are checked before they are used.
    """
    ...


ScaledDotProductAttention: Callable[..., Operation[DnnActor, AccelRef | AttentionResult]] = message_of(
    scaled_dot_product_attention
)
