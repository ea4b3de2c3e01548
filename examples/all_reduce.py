"""Sum one array from each device, with a custom kernel that reads the arrays of all devices.

python examples/all_reduce.py --devices 3 --isolation process
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from typing import ClassVar

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel.backends.base import HostCall, kernel, ops
from trio_accel.devices import LibraryActor, Operation, Planned, Planner

# This example opens several contexts on one processor on purpose.
warnings.filterwarnings("ignore", "open_device", RuntimeWarning)


@ops.specification
class SumSpec(ops.OperationSpec):
    """``out = sum of terms``."""

    terms: tuple[ops.ArraySpec, ...] = ops.reads(variadic=True)
    out: ops.ArraySpec = ops.writes()


@kernel(SumSpec, backend="cpu")
def sum_cpu(spec: SumSpec, call: HostCall) -> None:
    """Run in the stream's thread. The arrays of other devices are views of those devices' memory."""
    out = call.array(spec.out)
    out[...] = 0
    for term in spec.terms:
        np.add(out, call.array(term, write=False), out=out)


class SumActor(LibraryActor):
    """The actor that runs this module's kernels on one device, on a separate stream."""

    library = "all_reduce"


@attrs.frozen(eq=False)
class Sum(Operation[SumActor, ta.AccelRef]):
    """The sum of arrays in rank order, so that every rank gets the same bits."""

    rank: int
    terms: Sequence[ta.AccelRef]
    library: ClassVar[str] = "all_reduce:SumActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        """Plan the operation in the caller's task. If this raises an error, nothing is launched."""
        terms = [planner.read("terms", term) for term in self.terms]
        if len({(term.shape, term.dtype) for term in terms}) > 1:
            raise ValueError(f"{planner.name}: terms must have the same shape and dtype")
        out = planner.output(terms[0].shape, terms[0].dtype)
        return Planned(SumSpec(tuple(terms), out.spec), out)


async def main() -> None:
    """Sum one array from each device."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--isolation", default="process", choices=["inline", "process"])
    given = parser.parse_args()
    options = ta.DeviceOptions(isolation=given.isolation)
    hosts = np.random.default_rng(1).standard_normal((given.devices, 1000))
    async with (
        ta.open_system("reduce") as system,
        system.open_devices(["cpu"] * given.devices, options=options) as devices,
        ta.open_world(devices) as world,
    ):
        arrays = [await device.put(host) for device, host in zip(devices, hosts, strict=True)]
        sums = await world.run(Sum, arrays)
        results = [await total.to_host() for total in sums]
        error = np.abs(results[0] - hosts.sum(axis=0)).max()
        same = all(result.tobytes() == results[0].tobytes() for result in results)
        print(f"{len(sums)} ranks, right by {error:.0e}, {'the same' if same else 'other'} bits")
        try:
            await world.run(Sum, [arrays[0][:10], *arrays[1:]])
        except ValueError as refused:
            print(f"refused: {refused}")


if __name__ == "__main__":
    # Run the imported module, because the devices find the kernels and the actor by its name.
    import all_reduce

    trio.run(all_reduce.main)
