"""Your own library with kernels: a clipped weighted sum, on the CPU and on CUDA devices.

The device finds the kernels and the actor by the name of this module. `blend.py` uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import attrs
import numpy as np

import trio_accel as ta
from trio_accel.backends.base import DeviceCall, HostCall, KernelDevice, kernel, ops
from trio_accel.devices import LibraryActor, Operand, Operation, Planned, Planner

if TYPE_CHECKING:
    from cuda.core import ObjectCode


@ops.specification
class BlendSpec(ops.OperationSpec):
    """``out = clip(sum(weight * term) + bias, -1, 1)``, of vectors in float64."""

    weights: tuple[float, ...] = ops.scalar()
    terms: tuple[ops.ArraySpec, ...] = ops.reads(variadic=True)
    bias: ops.ArraySpec | None = ops.reads(optional=True)
    out: ops.ArraySpec = ops.writes()
    counts: ops.StatusArray = ops.status()  # the counts of clipped elements and NaN

    def check_status(self) -> None:
        """Raise an error if the result contains NaN."""
        if self.counts[1]:
            raise ta.LibraryError(f"{self.counts[1]} elements are NaN", library="blend", code="nan")


class Blended(NamedTuple):
    """The reply: the array, and the number of its clipped elements."""

    array: ta.AccelRef
    clipped: int


class BlendActor(LibraryActor):
    """The actor that runs this module's kernels, on a separate stream."""

    library = "own_kernel"


@attrs.frozen(eq=False)
class Blend(Operation[BlendActor, Blended]):
    """The weighted sum of vectors, clipped to the range from -1 to 1."""

    terms: tuple[Operand, ...]
    weights: tuple[float, ...]
    bias: Operand | None = None
    library: ClassVar[str] = "own_kernel:BlendActor"

    def plan(self, planner: Planner) -> Planned[Blended]:
        """Plan the operation in the caller's task. If this raises an error, nothing is launched."""
        terms = tuple(planner.read(f"terms[{i}]", term) for i, term in enumerate(self.terms))
        bias = None if self.bias is None else planner.read("bias", self.bias)
        arrays = {(array.shape, array.dtype) for array in (*terms, *filter(None, [bias]))}
        if len(terms) != len(self.weights) or arrays != {(terms[0].shape, ta.DType.float64)}:
            raise ValueError(f"{planner.name}: give float64 arrays of one shape, and a weight for each term")
        out, counts = planner.output(terms[0].shape, ta.DType.float64), planner.status(2)
        spec = BlendSpec(self.weights, terms, bias, out.spec, counts)
        return Planned(spec, finish=lambda: Blended(out, int(counts[0])))


@kernel(BlendSpec, backend="cpu")
def blend_cpu(spec: BlendSpec, call: HostCall) -> None:
    """Compute the sum in the stream's thread."""
    terms, out = [call.array(term) for term in spec.terms], call.array(spec.out)
    bias = 0.0 if spec.bias is None else call.array(spec.bias)
    total = sum((weight * term for weight, term in zip(spec.weights, terms, strict=True)), bias)
    np.clip(total, -1.0, 1.0, out=out)
    spec.counts[:] = np.count_nonzero(np.abs(total) > 1.0), np.count_nonzero(np.isnan(total))


SOURCE = """
extern "C" __global__ void add(double* out, const double* x, double weight, int first, long long n) {
    long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i < n) out[i] = (first ? 0.0 : out[i]) + weight * x[i];
}
extern "C" __global__ void clip(double* out, int* counts, long long n) {
    long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= n) return;
    if (out[i] != out[i]) atomicAdd(counts + 1, 1);
    else if (fabs(out[i]) > 1.0) { atomicAdd(counts, 1); out[i] = out[i] > 0.0 ? 1.0 : -1.0; }
}
"""


def compiled(spec: BlendSpec, device: KernelDevice) -> ObjectCode:
    """Compile the kernels; called once, outside the event loop."""
    from cuda.core import Device, Program, ProgramOptions

    return Program(SOURCE, "c++", ProgramOptions(arch=f"sm_{Device(device.info.index).arch}")).compile(
        "cubin"
    )


@kernel(BlendSpec, backend="cuda", plan=compiled)
def blend_cuda(spec: BlendSpec, call: DeviceCall[ObjectCode]) -> None:
    """Enqueue the kernels on the call's stream. The arrays stay allocated until the work is done."""
    from cuda.core import LaunchConfig, Stream, launch

    n, out = spec.out.size, call.result(spec.out)
    stream, grid = Stream.from_handle(call.handle), LaunchConfig(grid=max(1, -(-n // 256)), block=256)
    terms = [*zip(spec.weights, spec.terms, strict=True), *([(1.0, spec.bias)] if spec.bias else [])]
    for number, (weight, term) in enumerate(terms):
        arguments = (out, call.packed(term), np.float64(weight), np.int32(not number), np.int64(n))
        launch(stream, grid, call.plan.get_kernel("add"), *arguments)
    launch(stream, grid, call.plan.get_kernel("clip"), out, call.status(spec.counts), np.int64(n))
