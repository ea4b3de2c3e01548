"""An operation that spans devices, kernels included: the sum of one array of each device, on every device.

The devices find kernels and actor by the name of this module; `all_reduce.py` is a program that uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
import numpy as np

import trio_accel as ta
from trio_accel.backends.base import HostCall, kernel, ops
from trio_accel.devices import LibraryActor, MultiDeviceOperation, PartPlanner, PlannedParts


@ops.specification
class SumPart(ops.OperationSpec):
    """What one device runs: ``out = sum of terms``; its own term is among them."""

    term: ops.ArraySpec = ops.reads()
    out: ops.ArraySpec = ops.writes()
    terms: ops.Peers = ops.peers()


class CollectiveActor(LibraryActor):
    """Serves this module's kernels on one device, on a stream of its own."""

    library = "own_collective"


@attrs.frozen(eq=False)
class AllReduce(MultiDeviceOperation[tuple[ta.AccelRef, ...]]):
    """The sum of arrays on several devices. Every device gets the same bits."""

    arrays: Sequence[ta.AccelRef]
    library: ClassVar[str] = "own_collective:CollectiveActor"

    @property
    def devices(self) -> Sequence[ta.Device]:
        """The operands name them."""
        return [array.device for array in self.arrays]

    def plan(self, planners: Sequence[PartPlanner]) -> PlannedParts[tuple[ta.AccelRef, ...]]:
        """Runs in the caller's task: what is raised here launches nothing, on no device."""
        terms = [planner.read("arrays", array) for planner, array in zip(planners, self.arrays, strict=True)]
        if len({(term.shape, term.dtype) for term in terms}) > 1:
            raise ValueError(f"{planners[0].name}: arrays must have one shape and dtype")
        outs = [planner.output(terms[0].shape, terms[0].dtype) for planner in planners]
        lent = [planner.lend(term) for planner, term in zip(planners, terms, strict=True)]
        specs = [
            SumPart(term, out.spec, planner.peers(*lent))
            for planner, term, out in zip(planners, terms, outs, strict=True)
        ]
        return PlannedParts(specs, tuple(outs))


@kernel(SumPart, backend="cpu")
def sum_cpu(spec: SumPart, call: HostCall) -> None:
    """Add in the thread of the stream, once all streams have come to it: what the others lend is there."""
    out, terms = call.array(spec.out), call.peers(spec.terms)
    np.copyto(out, terms[0])
    for term in terms[1:]:
        np.add(out, term, out=out)
