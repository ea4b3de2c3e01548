"""Convolutions, pooling and attention: by cuDNN what it has, and all else by kernels of the backend's own."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import attrs

from ...base import DeviceArray, DType, Ints, kernel, no_element, ops
from ..kit._library import KernelCall, LibraryDevice
from ._attention import AttentionLibrary
from ._cudnn import (
    FLOATS,
    KINDS,
    LANES,
    CudnnGraph,
    DnnKernels,
    TensorDescription,
    aligned,
    aligned_result,
    first_wrong,
    grid_of,
    images_of,
    wide,
    wide_of,
    wide_result,
)

_Spec: TypeAlias = ops.ConvolutionSpec | ops.ConvolutionInputGradSpec | ops.ConvolutionWeightGradSpec


@attrs.frozen
class _Roles:
    """The arrays of a convolution by their roles.

    Attributes:
        images: ``(n, c, *spatial)``.
        weight: The weights.
        windows: ``(n, o, *windows)``.
        target: The name of the result among them.
        kernel: Name of the kernel by definition.
        node: Name of cuDNN's node.
        arguments: The arrays that it takes, by the names of its arguments.
    """

    images: ops.ArraySpec
    weight: ops.ArraySpec
    windows: ops.ArraySpec
    target: str
    kernel: str
    node: str
    arguments: dict[str, str]

    @classmethod
    def of(cls, spec: _Spec) -> _Roles:
        """Read them off a specification."""
        if isinstance(spec, ops.ConvolutionSpec):
            names = {"image": "images", "weight": "weight"}
            return cls(spec.x, spec.weight, spec.out, "windows", "convolution", "conv_fprop", names)
        if isinstance(spec, ops.ConvolutionInputGradSpec):
            names = {"loss": "windows", "filter": "weight"}
            return cls(
                spec.out, spec.weight, spec.grad, "images", "convolution_input_grad", "conv_dgrad", names
            )
        names = {"image": "images", "loss": "windows"}
        return cls(spec.x, spec.out, spec.grad, "weight", "convolution_weight_grad", "conv_wgrad", names)

    def arrays(self) -> dict[str, ops.ArraySpec]:
        """Return them by their names, the result last."""
        named = {"images": self.images, "weight": self.weight, "windows": self.windows}
        named[self.target] = named.pop(self.target)
        return named


@attrs.frozen(eq=False)
class _ConvolutionPlan:
    """The way in which a convolution is computed.

    Attributes:
        graph: cuDNN's graph; None for a kernel by definition.
        has_bias: Whether the graph adds the bias.
    """

    graph: CudnnGraph | None = None
    has_bias: bool = False


class ConvolutionLibrary(DnnKernels):
    """Convolutions, and their gradients."""

    def _plan_convolution(self, spec: _Spec, device: LibraryDevice) -> _ConvolutionPlan:
        roles = _Roles.of(spec)
        trailing_zeros = _trailing_zeros(spec, roles)
        # cuDNN's front end has factors of float32, which make nonsense of float64. And no window ends before
        # the last element by more than a step.
        is_left = spec.out.dtype is DType.float64 or not all(array.size for array in roles.arrays().values())
        if not is_left and all(
            -step < zeros for zeros, step in zip(trailing_zeros, spec.stride, strict=True)
        ):
            bias = None if isinstance(spec, ops.ConvolutionWeightGradSpec) else spec.bias
            graph = None if bias is None else self._graph_of(spec, roles, trailing_zeros, bias)
            if graph is not None:
                return _ConvolutionPlan(graph, has_bias=True)
            graph = self._graph_of(spec, roles, trailing_zeros, None)
            if graph is not None:
                self._load_kernels()
                return _ConvolutionPlan(graph)
        self._load_kernels()
        return _ConvolutionPlan()

    def _graph_of(
        self, spec: _Spec, roles: _Roles, trailing_zeros: Ints, bias: ops.ArraySpec | None
    ) -> CudnnGraph | None:
        """Build cuDNN's graph; None if it lacks kernels for it."""
        cudnn = self._find_cudnn()
        if cudnn is None:
            return None
        # Several numbers of zeros after the images give the same windows. Take the number of zeros before the
        # images if possible, and otherwise the fewest.
        after = [
            leading if zeros <= leading < zeros + step else max(zeros, 0)
            for leading, zeros, step in zip(spec.padding, trailing_zeros, spec.stride, strict=True)
        ]
        # There are two spatial axes at least.
        is_line = len(spec.stride) == 1
        numbers = {
            "pre_padding": [*(0,) * is_line, *spec.padding],
            "post_padding": [*(0,) * is_line, *after],
            "stride": [*(1,) * is_line, *spec.stride],
            "dilation": [*(1,) * is_line, *spec.dilation],
        }
        layouts = {name: _layout(array, len(spec.stride)) for name, array in roles.arrays().items()}
        result = layouts.pop(roles.target)
        if bias is not None:
            layouts["bias"] = TensorDescription.packed(
                bias.dtype, (1, bias.size, *(1,) * (len(result.shape) - 2))
            )
        layouts[roles.target] = result

        def describe(graph: Any, tensors: dict[str, Any]) -> list[Any]:
            arguments = {argument: tensors[name] for argument, name in roles.arguments.items()}
            output = getattr(graph, roles.node)(**arguments, **numbers)
            if bias is None:
                return [output]
            # The extents of images do not follow from the extents of windows.
            output.set_dim(list(result.shape)).set_stride(list(result.strides))
            return [graph.bias(input=output, bias=tensors["bias"])]

        is_exact = spec.out.dtype is DType.float32
        return cudnn.build(layouts, [roles.target], describe, is_exact=is_exact)

    @kernel(ops.ConvolutionSpec, backend="cuda", dtypes={"x": FLOATS}, plan=_plan_convolution)
    @kernel(ops.ConvolutionInputGradSpec, backend="cuda", dtypes={"grad": FLOATS}, plan=_plan_convolution)
    @kernel(ops.ConvolutionWeightGradSpec, backend="cuda", dtypes={"x": FLOATS}, plan=_plan_convolution)
    def _convolve(self, spec: _Spec, call: KernelCall) -> None:
        if not spec.out.size:
            return
        bias = None if isinstance(spec, ops.ConvolutionWeightGradSpec) else spec.bias
        plan: _ConvolutionPlan = call.plan
        if plan.graph is None:
            self._convolve_by_definition(spec, call, bias)
            return
        roles = _Roles.of(spec)
        arrays = roles.arrays()
        target = arrays.pop(roles.target)
        addresses = {name: aligned(call, array) for name, array in arrays.items()}
        if bias is not None and plan.has_bias:
            addresses["bias"] = aligned(call, bias)
        with aligned_result(call, target) as out:
            self._run_graph(plan.graph, call, addresses | {roles.target: out})
            if bias is not None and not plan.has_bias:
                size = math.prod(target.shape[-len(spec.stride) :])
                values = call.packed(bias), out, target.size, bias.size, size, KINDS[target.dtype]
                self.launch("add_bias", call, target.size, *values)

    def _convolve_by_definition(self, spec: _Spec, call: KernelCall, bias: ops.ArraySpec | None) -> None:
        """Launch a thread for each element of the result: correct, but much slower than the device allows."""
        roles = _Roles.of(spec)
        arrays, weight = roles.arrays(), roles.weight
        target = arrays.pop(roles.target)
        # The kernels take the arrays in this order.
        read = [arrays[name] for name in roles.arguments.values()]
        numbers = (
            *(target.size, images_of(roles.images, len(spec.stride)), spec.groups, weight.shape[1]),
            *(weight.shape[0] // spec.groups, *grid_of(spec, roles.images, roles.windows, weight.shape[2:])),
        )
        addresses = [wide(call, array) for array in read]
        addresses.append(0 if bias is None else wide(call, bias))
        count = target.size * (LANES if target is weight else 1)
        with wide_result(call, target) as out:
            is_double = target.dtype is DType.float64
            self.launch(roles.kernel, call, count, *addresses, out, *numbers, is_double)


def _trailing_zeros(spec: _Spec, roles: _Roles) -> Ints:
    """Return the number of zeros in the last window after the images, or of unused elements."""
    axes = len(spec.stride)
    geometry = zip(
        roles.images.shape[-axes:],
        roles.weight.shape[2:],
        roles.windows.shape[-axes:],
        spec.stride,
        spec.padding,
        spec.dilation,
        strict=True,
    )
    return tuple(
        [
            (count - 1) * stride + dilation * (width - 1) + 1 - extent - padding
            for extent, width, count, stride, padding, dilation in geometry
        ]
    )


def _layout(array: ops.ArraySpec, axes: int) -> TensorDescription:
    """Return the layout of images or weights without gaps, with two spatial axes, and one for a batch."""
    above, spatial = array.shape[:-axes], array.shape[-axes:]
    return TensorDescription.packed(
        array.dtype, (*(1,) * (2 - len(above)), *above, *(1,) * (axes == 1), *spatial)
    )


_POOLS: dict[type[ops.OperationSpec], str] = {
    ops.MaxPoolSpec: "pool",
    ops.AvgPoolSpec: "pool",
    ops.AvgPoolGradSpec: "mean_pool_grad",
    ops.MaxPoolGradSpec: "max_pool_grad",
}

_Pool: TypeAlias = ops.MaxPoolSpec | ops.AvgPoolSpec | ops.AvgPoolGradSpec


class PoolingLibrary(DnnKernels):
    """Maxima and means of windows, a thread for each; and their gradients."""

    def captures(self, spec: ops.OperationSpec) -> bool:
        """See `EnqueuingLibrary.captures`: the host looks at checked indices."""
        return not isinstance(spec, ops.MaxPoolGradSpec) and super().captures(spec)

    def _plan_pool(self, spec: _Pool | ops.MaxPoolGradSpec, device: LibraryDevice) -> str:
        self._load_kernels()
        return _POOLS[type(spec)]

    @kernel(ops.MaxPoolSpec, backend="cuda", dtypes={"x": FLOATS}, plan=_plan_pool)
    @kernel(ops.AvgPoolSpec, backend="cuda", dtypes={"x": FLOATS}, plan=_plan_pool)
    @kernel(ops.AvgPoolGradSpec, backend="cuda", dtypes={"grad": FLOATS}, plan=_plan_pool)
    def _pool(self, spec: _Pool, call: KernelCall) -> None:
        out = spec.out
        if not out.size:
            return
        # The source, which is either the images or their windows; and both of them.
        source, images, windows = (
            (spec.grad, out, spec.grad) if isinstance(spec, ops.AvgPoolGradSpec) else (spec.x, spec.x, out)
        )
        means: Ints = (0, 0, 0, 0, False)
        indices, is_mean = 0, not isinstance(spec, ops.MaxPoolSpec)
        if isinstance(spec, ops.MaxPoolSpec):
            indices = 0 if spec.indices is None else call.result(spec.indices)
        else:
            means = (
                *(0,) * (3 - len(spec.padding_after)),
                *spec.padding_after,
                spec.divisor,
                spec.count_include_pad,
            )
        values = call.packed(source), call.result(out), indices, out.size
        grid = grid_of(spec, images, windows, spec.window)
        flags = not spec.window[0], KINDS[source.dtype], is_mean
        self.launch(call.plan, call, out.size, *values, *grid, *means, *flags)

    @kernel(ops.MaxPoolGradSpec, backend="cuda", dtypes={"grad": FLOATS}, plan=_plan_pool)
    def _max_pool_grad(self, spec: ops.MaxPoolGradSpec, call: KernelCall) -> None:
        if not spec.out.size:
            return
        size = math.prod(spec.out.shape[2:])

        def judge(words: ops.StatusArray) -> None:
            index = first_wrong(words)
            if words[0]:
                raise no_element(index, size)

        words = call.words(3, judge)
        is_wide = spec.indices.dtype is DType.int64
        with wide_result(call, spec.out) as out:
            call.fill(DeviceArray.packed(out, wide_of(spec.out.dtype), spec.out.shape), 0)
            values = (
                *(wide(call, spec.grad), call.packed(spec.indices), out, words, spec.grad.size),
                *(math.prod(spec.grad.shape[2:]), size, is_wide, spec.grad.dtype is DType.float64),
            )
            self.launch(call.plan, call, spec.grad.size, *values)


class DnnLibrary(ConvolutionLibrary, PoolingLibrary, AttentionLibrary):
    """Kernels of the source `dnn`, products of cuBLAS, and graphs of cuDNN."""
