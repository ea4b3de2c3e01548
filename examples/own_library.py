"""Your own operation and library actor: the Gram matrix of real or complex measurements.

Run it with: python own_library.py --rows 1000 --columns 8 --isolation process
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import ClassVar, Literal

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel import linalg
from trio_accel.backends.base.contract.ops import Transpose
from trio_accel.devices import LibraryActor, Operand, Operation, Planned, Planner


class StatisticsActor(LibraryActor):
    """The actor that runs this module's operations, on a separate stream."""

    library = "blas"  # the backend's library for its launches


@attrs.frozen(eq=False)
class Gram(Operation[StatisticsActor, ta.AccelRef]):
    """The inner products of the columns, ``a.conj().T @ a``, as a new array."""

    a: Operand
    library: ClassVar[str] = "own_library:StatisticsActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        """Plan the operation in the caller's task. If this raises an error, nothing is launched."""
        a = planner.read("a", self.a)
        if a.ndim != 2:
            raise ValueError(f"{planner.name}: a must have two axes, got shape {a.shape}")
        if not a.dtype.is_inexact:
            a = planner.convert(a, ta.DType.float64)
        columns = a.shape[1]
        out = planner.output((columns, columns), a.dtype)
        transpose: Transpose = "C" if a.dtype.kind == "complex" else "T"
        return Planned(linalg.gemm.spec(1.0, a, a, 0.0, transpose, "N", out.spec), out)


async def run(rows: int, columns: int, isolation: Literal["inline", "process"], backend: str | None) -> float:
    """Return the largest relative error."""
    rng, errors = np.random.default_rng(0), list[float]()
    counts, real, imaginary = rng.integers(0, 100, (rows, columns)), *rng.normal(size=(2, rows, columns))
    options = ta.DeviceOptions(isolation=isolation)
    async with ta.open_system("own") as system, system.open_device(backend, options=options) as device:
        for a in (counts, real, real + 1j * imaginary):
            gram = await device.ask(Gram(await device.put(a)))
            reference = a.conj().T @ a
            errors.append(float(np.abs(await gram.to_host() - reference).max() / np.abs(reference).max()))
        print(next(node for node in system.tree().walk() if node.actor_class == "StatisticsActor"))
    return max(errors)


def main() -> int:
    """Return the exit code: 0 if the result is right."""
    parser = argparse.ArgumentParser(description="Your own operation.")
    parser.add_argument("--rows", type=int, default=1000, help="samples")
    parser.add_argument("--columns", type=int, default=8, help="measured quantities of each sample")
    parser.add_argument("--isolation", choices=("inline", "process"), default="inline")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    error = trio.run(partial(run, **vars(parser.parse_args())))
    print(f"largest relative error {error:.1e}: {'right' if error < 1e-12 else 'WRONG'}")
    return 0 if error < 1e-12 else 1


if __name__ == "__main__":
    raise SystemExit(main())
