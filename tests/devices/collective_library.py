"""Operations that span devices, from outside: a sum over devices, a copy between two, and what goes wrong.

It imports nothing of a backend but what its CUDA kernels call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

import trio_accel as ta
from trio_accel.backends.base import KernelCall, kernel, ops
from trio_accel.devices import (
    LibraryActor,
    MultiDeviceOperation,
    Operand,
    Operation,
    PartPlanner,
    Planned,
    PlannedParts,
    Planner,
)


class CollectiveActor(LibraryActor):
    library = __name__


PATH = f"{__name__}:CollectiveActor"


@ops.specification
class SumPart(ops.OperationSpec):
    """``out = sum of terms``: the terms of all parts, this one's among them."""

    term: ops.ArraySpec = ops.reads()
    out: ops.ArraySpec = ops.writes()
    terms: ops.Peers = ops.peers()


@attrs.frozen(eq=False)
class AllReduce(MultiDeviceOperation[tuple[ta.AccelRef, ...]]):
    """The sum of one array of each device, on every device, with the same rounding on all."""

    arrays: Sequence[Operand]
    on: Sequence[ta.Device] | None = None
    out: Sequence[ta.AccelRef] | None = None
    library: ClassVar[str] = PATH

    @property
    def devices(self) -> Sequence[ta.Device]:
        return self.on or [array.device for array in self.arrays if isinstance(array, ta.AccelRef)]

    def plan(self, planners: Sequence[PartPlanner]) -> PlannedParts[tuple[ta.AccelRef, ...]]:
        terms = [planner.read("arrays", array) for planner, array in zip(planners, self.arrays, strict=True)]
        if len({(term.shape, term.dtype) for term in terms}) != 1:
            raise ValueError(f"{planners[0].name}: arrays must have one shape and dtype")
        outs = [
            planner.output(term.shape, term.dtype, out)
            for planner, term, out in zip(planners, terms, self.out or [None] * len(terms), strict=True)
        ]
        for planner, term, out in zip(planners, terms, outs, strict=True):
            planner.distinct("out", out.spec, arrays=term)
        lent = [planner.lend(term) for planner, term in zip(planners, terms, strict=True)]
        specs = [
            SumPart(term, out.spec, planner.peers(*lent))
            for planner, term, out in zip(planners, terms, outs, strict=True)
        ]
        return PlannedParts(specs, tuple(outs))


@kernel(SumPart, backend="cpu")
def sum_cpu(spec: SumPart, call: KernelCall) -> None:
    out, terms = call.array(spec.out), call.peers(spec.terms)
    np.copyto(out, terms[0])
    for term in terms[1:]:
        np.add(out, term, out=out)


SOURCE = """
extern "C" __global__ void add(double* out, const double* term, int first, long long n) {
    long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i < n) out[i] = (first ? 0.0 : out[i]) + term[i];
}
extern "C" __global__ void increment(double* array, int* met, int count, long long n) {
    long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i < n) array[i] += 1.0;
    if (!i) *met = count;
}
"""


def compiled(spec: ops.OperationSpec, device: Any) -> Any:
    from cuda.core import Device, Program, ProgramOptions

    arch = f"sm_{Device(device.info.index).arch}"
    return Program(SOURCE, "c++", ProgramOptions(arch=arch)).compile("cubin")


@kernel(SumPart, backend="cuda", plan=compiled)
def sum_cuda(spec: SumPart, call: Any) -> None:
    """Arrays in float64 without gaps."""
    from cuda.core import LaunchConfig, Stream, launch

    if not all(array.is_contiguous for array in (call.array(spec.out), *call.peers(spec.terms))):
        raise ta.NotSupportedError("it adds arrays without gaps")
    n, stream = spec.out.size, Stream.from_handle(call.handle)
    grid, add = LaunchConfig(grid=max(1, -(-n // 256)), block=256), call.plan.get_kernel("add")
    for number, term in enumerate(call.peers(spec.terms)):
        launch(stream, grid, add, call.at(spec.out), term.address, np.int32(not number), np.int64(n))


@ops.specification
class SendPart(ops.OperationSpec):
    """The array is lent; nothing is to be done."""

    source: ops.ArraySpec = ops.reads()


@ops.specification
class ReceivePart(ops.OperationSpec):
    """``out = source``, an array of another device."""

    out: ops.ArraySpec = ops.writes()
    source: ops.Peers = ops.peers()


@attrs.frozen(eq=False)
class PeerCopy(MultiDeviceOperation[ta.AccelRef]):
    source: ta.AccelRef
    target: ta.Device
    out: ta.AccelRef | None = None
    library: ClassVar[str] = PATH

    @property
    def devices(self) -> Sequence[ta.Device]:
        return self.source.device, self.target

    def plan(self, planners: Sequence[PartPlanner]) -> PlannedParts[ta.AccelRef]:
        sender, receiver = planners
        source = sender.read("source", self.source)
        out = receiver.output(source.shape, source.dtype, self.out)
        return PlannedParts(
            [SendPart(source), ReceivePart(out.spec, receiver.peers(sender.lend(source)))], out
        )


@kernel(SendPart, backend="cpu")
def send_cpu(spec: SendPart, call: KernelCall) -> None:
    """Nothing is to be done."""


@kernel(ReceivePart, backend="cpu")
def receive_cpu(spec: ReceivePart, call: KernelCall) -> None:
    (source,) = call.peers(spec.source)
    np.copyto(call.array(spec.out), source)


@kernel(SendPart, backend="cuda")
def send_cuda(spec: SendPart, call: Any) -> None:
    """Nothing is to be done."""


@kernel(ReceivePart, backend="cuda")
def receive_cuda(spec: ReceivePart, call: Any) -> None:
    (source,), out = call.peers(spec.source), call.array(spec.out)
    if not source.is_contiguous:
        call.convert(source, out)
        return
    from cuda.bindings import driver

    call.device.context.check(
        driver.cuMemcpyDtoDAsync(out.address, source.address, source.nbytes, call.handle)
    )


@ops.specification
class RoundPart(ops.OperationSpec):
    """One part of a rendezvous of kernels: ``array += 1`` once all have met, unless something goes wrong.

    `how` is what goes wrong in this part: ``"refuses"``, ``"raises"`` where it is enqueued, ``"fails"`` and
    ``"crashes"`` where it runs. With one that `MEETINGS` has, the kernel waits there before it fails or ends.
    """

    array: ops.ArraySpec = ops.updates()
    how: str = ops.exact()
    peers: ops.Peers = ops.peers()
    met: ops.StatusArray = ops.status()


@attrs.frozen(eq=False)
class Round(MultiDeviceOperation[list[int]]):
    """The reply: what each part has in its status words, the number of its arrays."""

    arrays: Sequence[ta.AccelRef]
    how: Sequence[str]
    forget: int | None = None
    finish: Callable[[], None] | None = None
    library: ClassVar[str] = PATH

    @property
    def devices(self) -> Sequence[ta.Device]:
        return [array.device for array in self.arrays]

    def plan(self, planners: Sequence[PartPlanner]) -> PlannedParts[list[int]]:
        arrays = [
            planner.update("arrays", array) for planner, array in zip(planners, self.arrays, strict=True)
        ]
        lent = [planner.lend(array) for planner, array in zip(planners, arrays, strict=True)]
        words = [planner.status(1) for planner in planners]
        specs: list[ops.OperationSpec] = [
            RoundPart(array, how, planner.peers(*lent), met)
            for planner, array, how, met in zip(planners, arrays, self.how, words, strict=True)
        ]
        if self.forget is not None:
            specs[self.forget] = BarePart(arrays[self.forget])

        def finish() -> list[int]:
            if self.finish is not None:
                self.finish()
            return [int(met[0]) for met in words]

        return PlannedParts(specs, finish=finish)


@ops.specification
class BarePart(ops.OperationSpec):
    """No library has a kernel for it."""

    array: ops.ArraySpec = ops.updates()


@kernel(RoundPart, backend="cuda", plan=compiled)
def round_cuda(spec: RoundPart, call: Any) -> None:
    if spec.how in ("refuses", "raises"):
        raise ta.NotSupportedError("refused on purpose") if spec.how == "refuses" else RuntimeError(spec.how)
    from cuda.core import LaunchConfig, Stream, launch

    n, stream = spec.array.size, Stream.from_handle(call.handle)
    grid, increment = LaunchConfig(grid=max(1, -(-n // 256)), block=256), call.plan.get_kernel("increment")
    count = np.int32(len(call.peers(spec.peers)))
    launch(stream, grid, increment, call.at(spec.array), call.status(spec.met), count, np.int64(n))


MEETINGS: dict[str, threading.Barrier] = {}
"""By `RoundPart.how`: where kernels wait for each other."""


def refused(spec: RoundPart, device: object) -> str:
    if spec.how == "refuses":
        raise ta.NotSupportedError("refused on purpose")
    if spec.how == "raises":
        raise RuntimeError("raised on purpose")
    return spec.how


@kernel(RoundPart, backend="cpu", plan=refused, is_quick=True)
def round_cpu(spec: RoundPart, call: KernelCall) -> None:
    array, how = call.array(spec.array), spec.how
    barrier = MEETINGS.get(how)
    if barrier is not None:
        spec.peers.on_failure(barrier.abort)
        barrier.wait()
    if how.startswith("fails"):
        raise ta.LibraryError("failed on purpose", library="collective", code="how")
    if how == "crashes":
        raise RuntimeError("crashed on purpose")
    array[...] += 1
    spec.met[0] = len(spec.peers.arrays)


@ops.specification
class DoubleSpec(ops.OperationSpec):
    """``array *= 2``, on one device."""

    array: ops.ArraySpec = ops.updates()


@attrs.frozen(eq=False)
class Double(Operation[CollectiveActor, None]):
    array: ta.AccelRef
    library: ClassVar[str] = PATH

    def plan(self, planner: Planner) -> Planned[None]:
        return Planned(DoubleSpec(planner.update("array", self.array)))


@kernel(DoubleSpec, backend="cuda")
def double_cuda(spec: DoubleSpec, call: Any) -> None:
    array = call.array(spec.array)
    call.convert(array, array, scale=2.0)


@kernel(DoubleSpec, backend="cpu")
def double_cpu(spec: DoubleSpec, call: KernelCall) -> None:
    array = call.array(spec.array)
    np.multiply(array, 2, out=array)


class OtherActor(CollectiveActor):
    """The same kernels, on streams of their own."""


@attrs.frozen(eq=False)
class OtherRound(Round):
    library: ClassVar[str] = f"{__name__}:OtherActor"


@attrs.frozen(eq=False)
class OtherDouble(Double):
    library: ClassVar[str] = f"{__name__}:OtherActor"


@attrs.frozen(eq=False)
class OtherAllReduce(AllReduce):
    library: ClassVar[str] = f"{__name__}:OtherActor"


@ops.specification
class AccumulatePart(ops.OperationSpec):
    """``total += sum of terms``; with `how`, the kernel fails."""

    term: ops.ArraySpec = ops.reads()
    total: ops.ArraySpec = ops.updates()
    how: str = ops.exact()
    terms: ops.Peers = ops.peers()


@attrs.frozen(eq=False)
class Accumulate(MultiDeviceOperation[None]):
    """Add the arrays of all devices to one array of each."""

    arrays: Sequence[Operand]
    totals: Sequence[ta.AccelRef]
    how: Sequence[str] = ("", "")
    library: ClassVar[str] = PATH

    @property
    def devices(self) -> Sequence[ta.Device]:
        return [total.device for total in self.totals]

    def plan(self, planners: Sequence[PartPlanner]) -> PlannedParts[None]:
        terms = [planner.read("arrays", array) for planner, array in zip(planners, self.arrays, strict=True)]
        totals = [
            planner.update("totals", total) for planner, total in zip(planners, self.totals, strict=True)
        ]
        lent = [planner.lend(term) for planner, term in zip(planners, terms, strict=True)]
        return PlannedParts(
            [
                AccumulatePart(term, total, how, planner.peers(*lent))
                for planner, term, total, how in zip(planners, terms, totals, self.how, strict=True)
            ]
        )


@kernel(AccumulatePart, backend="cpu")
def accumulate_cpu(spec: AccumulatePart, call: KernelCall) -> None:
    if spec.how == "fails":
        raise ta.LibraryError("failed on purpose", library="collective", code="how")
    if spec.how == "crashes":
        raise RuntimeError("crashed on purpose")
    total = call.array(spec.total)
    for term in call.peers(spec.terms):
        total += term
