"""Which benchmarks there are, and which of them a name means."""

from __future__ import annotations

from collections.abc import Sequence

from . import actor_lives, actors, devices, loop_lag
from ._harness import Benchmark

__all__ = ["BENCHMARKS", "select"]

BENCHMARKS: tuple[Benchmark, ...] = (
    *actors.BENCHMARKS,
    *actor_lives.BENCHMARKS,
    *devices.BENCHMARKS,
    *loop_lag.BENCHMARKS,
)


def select(names: Sequence[str], benchmarks: Sequence[Benchmark] = BENCHMARKS) -> tuple[Benchmark, ...]:
    """Find benchmarks by their names or their group's; all of them where no name is given.

    Raises:
        ValueError: A name is neither; the message lists what there is.
    """
    groups = {benchmark.group for benchmark in benchmarks}
    known = groups | {benchmark.name for benchmark in benchmarks}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no benchmark or group {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    wanted = set(names) or groups
    return tuple(benchmark for benchmark in benchmarks if wanted & {benchmark.name, benchmark.group})
