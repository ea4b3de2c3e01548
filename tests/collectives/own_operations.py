"""A user's own operations, run by a world: sums of all ranks' arrays, also into an array."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

import trio_accel as ta
from trio_accel.backends.base import KernelCall, kernel, ops
from trio_accel.devices import LibraryActor, Operand, Operation, Planned, Planner


class RanksActor(LibraryActor):
    library = __name__


@ops.specification
class SumSpec(ops.OperationSpec):
    """``out = sum of terms``."""

    terms: tuple[ops.ArraySpec, ...] = ops.reads(variadic=True)
    out: ops.ArraySpec = ops.writes()


@attrs.frozen(eq=False)
class Sum(Operation[RanksActor, ta.AccelRef]):
    """The sum of arrays with one shape, with the same rounding on every device."""

    rank: int
    terms: Sequence[Operand]
    out: ta.AccelRef | None = None
    library: ClassVar[str] = f"{__name__}:RanksActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        terms = [planner.read("terms", term) for term in self.terms]
        if len({(term.shape, term.dtype) for term in terms}) != 1:
            raise ValueError(f"{planner.name}: terms must have one shape and dtype")
        out = planner.output(terms[0].shape, terms[0].dtype, self.out)
        return Planned(SumSpec(tuple(terms), out.spec), out)


@kernel(SumSpec, backend="cpu")
def sum_cpu(spec: SumSpec, call: KernelCall) -> None:
    out, terms = call.array(spec.out), [call.array(term, write=False) for term in spec.terms]
    np.copyto(out, terms[0])
    for term in terms[1:]:
        np.add(out, term, out=out)


SOURCE = """
extern "C" __global__ void add(double* out, const double* term, int first, long long n) {
    long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i < n) out[i] = (first ? 0.0 : out[i]) + term[i];
}
"""


def compiled(spec: ops.OperationSpec, device: Any) -> Any:
    from cuda.core import Device, Program, ProgramOptions

    arch = f"sm_{Device(device.info.index).arch}"
    return Program(SOURCE, "c++", ProgramOptions(arch=arch)).compile("cubin")


@kernel(SumSpec, backend="cuda", plan=compiled)
def sum_cuda(spec: SumSpec, call: Any) -> None:
    """Arrays in float64 without gaps."""
    from cuda.core import LaunchConfig, Stream, launch

    terms = [call.array(term) for term in spec.terms]
    if not all(array.is_contiguous for array in (call.array(spec.out), *terms)):
        raise ta.NotSupportedError("it adds arrays without gaps")
    n, stream = spec.out.size, Stream.from_handle(call.handle)
    grid, add = LaunchConfig(grid=max(1, -(-n // 256)), block=256), call.plan.get_kernel("add")
    for number, term in enumerate(terms):
        launch(stream, grid, add, call.address_of(spec.out), term.address, np.int32(not number), np.int64(n))


@ops.specification
class AccumulateSpec(ops.OperationSpec):
    """``total += sum of terms``; with `how`, the kernel fails."""

    terms: tuple[ops.ArraySpec, ...] = ops.reads(variadic=True)
    total: ops.ArraySpec = ops.updates()
    how: str = ops.exact()
    counts: ops.StatusArray = ops.status()


@attrs.frozen(eq=False)
class Accumulate(Operation[RanksActor, int]):
    """Add the arrays of all ranks to one of a rank; replies with their number."""

    terms: Sequence[ta.AccelRef]
    total: ta.AccelRef
    how: str = ""
    library: ClassVar[str] = f"{__name__}:RanksActor"

    def plan(self, planner: Planner) -> Planned[int]:
        terms, counts = tuple([planner.read("terms", term) for term in self.terms]), planner.status(1)
        spec = AccumulateSpec(terms, planner.update("total", self.total), self.how, counts)
        return Planned(spec, finish=lambda: int(counts[0]))


MEETINGS: dict[str, threading.Barrier] = {}
"""By `AccumulateSpec.how`: where kernels wait until the test has come, too."""


@kernel(AccumulateSpec, backend="cpu")
def accumulate_cpu(spec: AccumulateSpec, call: KernelCall) -> None:
    if spec.how in MEETINGS:
        MEETINGS[spec.how].wait()
    if spec.how == "fails":
        raise ta.LibraryError("failed on purpose", library="own", code="how")
    if spec.how == "crashes":
        raise RuntimeError("crashed on purpose")
    total = call.array(spec.total)
    for term in spec.terms:
        total += call.array(term, write=False)
    spec.counts[0] = len(spec.terms)


@ops.specification
class DoubleSpec(ops.OperationSpec):
    """``array *= 2``."""

    array: ops.ArraySpec = ops.updates()


@attrs.frozen(eq=False)
class Double(Operation[RanksActor, None]):
    array: ta.AccelRef
    library: ClassVar[str] = f"{__name__}:RanksActor"

    def plan(self, planner: Planner) -> Planned[None]:
        return Planned(DoubleSpec(planner.update("array", self.array)))


@kernel(DoubleSpec, backend="cpu")
def double_cpu(spec: DoubleSpec, call: KernelCall) -> None:
    array = call.array(spec.array)
    np.multiply(array, 2, out=array)


@kernel(DoubleSpec, backend="cuda")
def double_cuda(spec: DoubleSpec, call: Any) -> None:
    array = call.array(spec.array)
    call.convert(array, array, scale=2.0)


@ops.specification
class BareSpec(ops.OperationSpec):
    """No library has a kernel for it."""

    array: ops.ArraySpec = ops.writes()


@attrs.frozen(eq=False)
class Bare(Operation[RanksActor, ta.AccelRef]):
    terms: Sequence[ta.AccelRef]
    library: ClassVar[str] = f"{__name__}:RanksActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        out = planner.output((2,), ta.DType.float64)
        return Planned(BareSpec(out.spec), out)
