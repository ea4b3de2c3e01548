"""Specifications of neural networks: convolutions, pooling and attention, as vendors' libraries divide them.

Arrays of images are ``(n, channels, *spatial)``; without the axis n, they are one image.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from ..dtypes import Ints
from ._array import ArraySpec, exact, reads, scalar, writes
from ._spec import OperationSpec, specification

__all__ = [
    "Alignment",
    "AttentionGradSpec",
    "AttentionSpec",
    "AvgPoolGradSpec",
    "AvgPoolSpec",
    "ConvolutionInputGradSpec",
    "ConvolutionSpec",
    "ConvolutionWeightGradSpec",
    "MaxPoolGradSpec",
    "MaxPoolSpec",
]


@specification
class _ConvolutionFields(OperationSpec):
    """Fields of a convolution and its transposed maps; see `ConvolutionSpec`."""

    stride: Ints = exact()
    padding: Ints = exact()
    dilation: Ints = exact()
    groups: int = exact()


@specification
class ConvolutionSpec(_ConvolutionFields):
    """Windows multiplied with weights and summed: a cross-correlation within each group of channels.

    The window of element ``i`` begins at ``i * stride - padding`` and takes every ``dilation``-th element;
    there are zeros outside of `x`. The shapes determine how far the last window reaches past the end of `x`.

    Attributes:
        stride: Steps from window to window, along each spatial axis.
        padding: Zeros before the first element.
        dilation: Steps between the elements of a window.
        groups: Groups of channels.
        x: ``(n, c, *spatial)``.
        weight: ``(o, c / groups, *window)``.
        bias: ``(o,)``, added to each element of a channel.
        out: ``(n, o, *windows)``.
    """

    x: ArraySpec = reads()
    weight: ArraySpec = reads()
    bias: ArraySpec | None = reads(optional=True)
    out: ArraySpec = writes()


@specification
class ConvolutionInputGradSpec(_ConvolutionFields):
    """The transposed map of `ConvolutionSpec` for its `x`: its gradient, and a transposed convolution.

    Attributes:
        stride: See `ConvolutionSpec`, as all fields without a word here.
        padding: Zeros before the first element of `out`.
        dilation: Steps between the elements of a window.
        groups: Groups of channels.
        grad: ``(n, o, *windows)``.
        weight: ``(o, c / groups, *window)``.
        bias: ``(c,)``, added to each element of a channel.
        out: ``(n, c, *spatial)``.
    """

    grad: ArraySpec = reads()
    weight: ArraySpec = reads()
    bias: ArraySpec | None = reads(optional=True)
    out: ArraySpec = writes()


@specification
class ConvolutionWeightGradSpec(_ConvolutionFields):
    """The transposed map of `ConvolutionSpec` for its `weight`.

    Attributes:
        stride: See `ConvolutionSpec`, as all fields without a word here.
        padding: Zeros before the first element of `x`.
        dilation: Steps between the elements of a window.
        groups: Groups of channels.
        x: ``(n, c, *spatial)``.
        grad: ``(n, o, *windows)``.
        out: ``(o, c / groups, *window)``.
    """

    x: ArraySpec = reads()
    grad: ArraySpec = reads()
    out: ArraySpec = writes()


@specification
class MaxPoolSpec(OperationSpec):
    """The greatest element of each window. NaN counts as greater than every number; of several, the first.

    Attributes:
        window: Elements of a window along each spatial axis. If they are 0, the pooling is adaptive: window i
            of n takes the elements from ``i * length // n`` to below ``ceil((i + 1) * length / n)``.
        stride: Steps from window to window. This and the next two are 0 if the pooling is adaptive.
        padding: Elements before the first one, which are ignored. Every window has an element.
        dilation: Steps between the elements of a window.
        x: ``(n, c, *spatial)``.
        out: ``(n, c, *windows)``.
        indices: The positions of the elements, counted over the spatial axes in C order: int64.
    """

    window: Ints = exact()
    stride: Ints = exact()
    padding: Ints = exact()
    dilation: Ints = exact()
    x: ArraySpec = reads()
    out: ArraySpec = writes()
    indices: ArraySpec | None = writes(optional=True)


@specification
class MaxPoolGradSpec(OperationSpec):
    """The transposed map of `MaxPoolSpec`: each value is added to the window's greatest element.

    An index outside fails the operation.

    Attributes:
        grad: ``(n, c, *windows)``.
        indices: The indices that `MaxPoolSpec` made, with the shape of `grad`: int32 or int64.
        out: ``(n, c, *spatial)``.
    """

    grad: ArraySpec = reads()
    indices: ArraySpec = reads()
    out: ArraySpec = writes()


@specification
class _Means(OperationSpec):
    """Fields of a mean pooling and its transposed map; see `AvgPoolSpec`."""

    window: Ints = exact()
    stride: Ints = exact()
    padding: Ints = exact()
    padding_after: Ints = exact()
    divisor: int = exact()
    count_include_pad: bool = exact()


@specification
class AvgPoolSpec(_Means):
    """The mean of each window; elements outside of `x` are zeros.

    Attributes:
        window: See `MaxPoolSpec`, as for all fields without a description here.
        stride: Steps from window to window.
        padding: Zeros before the first element.
        padding_after: Zeros after the last element; a window may also reach past these.
        divisor: The divisor of the sums; 0 for the number of the window's elements.
        count_include_pad: Whether that number includes the zeros of `padding` and `padding_after`.
        x: ``(n, c, *spatial)``.
        out: ``(n, c, *windows)``.
    """

    x: ArraySpec = reads()
    out: ArraySpec = writes()


@specification
class AvgPoolGradSpec(_Means):
    """The transposed map of `AvgPoolSpec`, with the same fields.

    Attributes:
        grad: ``(n, c, *windows)``.
        out: ``(n, c, *spatial)``.
    """

    grad: ArraySpec = reads()
    out: ArraySpec = writes()


Alignment: TypeAlias = Literal["upper_left", "lower_right"]
"""Where the diagonal of the scores begins, or ends."""


@specification
class _Scores(OperationSpec):
    """Fields that select the scores of an attention; see `AttentionSpec`."""

    window_left: int = exact()
    window_right: int = exact()
    alignment: Alignment = exact()
    scale: float = scalar()


@specification
class AttentionSpec(_Scores):
    """``softmax(scale * query @ key^T + mask) @ value``, of each head by itself.

    A score counts if the mask, the band and the lengths allow it. A row without such a score is zeros. A
    length or block out of range fails the operation before it is used.

    Attributes:
        window_left: The number of keys before its own that each query sees; -1 for all.
        window_right: The number of keys after its own; -1 for all, and 0 for a causal attention.
        alignment: Whether query i is aligned with key i, or the last query with the last key.
        scale: Factor of the products.
        query: ``(..., heads, rows, e)``. The axis of heads may be missing from all arrays.
        key: ``(..., kv_heads, columns, e)``; each head serves an equal number of query heads. With
            `block_table` the blocks ``(count, kv_heads, block, e)``.
        value: ``(..., kv_heads, columns, f)``, or likewise blocks.
        mask: Broadcasts to ``(..., heads, rows, columns)``: whether a score counts, or a number to add to it.
        query_lengths: ``(...)``: the number of rows that count. int32 or int64, as the next two.
        key_lengths: ``(...)``: the number of columns that count.
        block_table: ``(n, most)``: the blocks with the keys of each sequence, in order.
        out: ``(..., heads, rows, f)``.
        lse: ``(..., heads, rows)``: logarithms of the sums of exponentials, at least float32.
    """

    query: ArraySpec = reads()
    key: ArraySpec = reads()
    value: ArraySpec = reads()
    mask: ArraySpec | None = reads(optional=True)
    query_lengths: ArraySpec | None = reads(optional=True)
    key_lengths: ArraySpec | None = reads(optional=True)
    block_table: ArraySpec | None = reads(optional=True)
    out: ArraySpec = writes()
    lse: ArraySpec | None = writes(optional=True)


@specification
class AttentionGradSpec(_Scores):
    """The gradients of `AttentionSpec` without blocks, with the same fields.

    Attributes:
        grad: An array with the shape of `out`.
        out: The result of `AttentionSpec`.
        lse: Its logarithms of sums.
        grad_query: An array with the shape of `query`, and so on.
    """

    grad: ArraySpec = reads()
    query: ArraySpec = reads()
    key: ArraySpec = reads()
    value: ArraySpec = reads()
    out: ArraySpec = reads()
    lse: ArraySpec = reads()
    mask: ArraySpec | None = reads(optional=True)
    query_lengths: ArraySpec | None = reads(optional=True)
    key_lengths: ArraySpec | None = reads(optional=True)
    grad_query: ArraySpec = writes()
    grad_key: ArraySpec = writes()
    grad_value: ArraySpec = writes()
