"""Which benchmarks there are, and which of them a name means."""

from __future__ import annotations

from collections.abc import Sequence

from . import (
    actor_lives,
    actors,
    batches,
    cuda_bandwidth,
    cuda_completion,
    cuda_engine,
    cuda_lag,
    cuda_latency,
    cuda_mixed,
    cuda_recovery,
    cuda_throughput,
    device_lives,
    devices,
    loop_lag,
    waiting,
)
from ._harness import Benchmark, Isolation

__all__ = ["BENCHMARKS", "select"]

BENCHMARKS: tuple[Benchmark, ...] = (
    *actors.BENCHMARKS,
    *actor_lives.BENCHMARKS,
    *devices.BENCHMARKS,
    *device_lives.BENCHMARKS,
    *batches.BENCHMARKS,
    *loop_lag.BENCHMARKS,
    *waiting.BENCHMARKS,
    *cuda_latency.BENCHMARKS,
    *cuda_mixed.BENCHMARKS,
    *cuda_throughput.BENCHMARKS,
    *cuda_engine.BENCHMARKS,
    *cuda_bandwidth.BENCHMARKS,
    *cuda_completion.BENCHMARKS,
    *cuda_lag.BENCHMARKS,
    *cuda_recovery.BENCHMARKS,
)


def select(
    names: Sequence[str],
    *,
    isolation: Isolation | None = None,
    benchmarks: Sequence[Benchmark] = BENCHMARKS,
) -> tuple[Benchmark, ...]:
    """Find benchmarks by their names or their group's; all of them where no name is given.

    Args:
        names: Names and groups.
        isolation: Only those that measure a device whose context lives there; the names can do without it.
        benchmarks: Those there are.

    Raises:
        ValueError: A name is neither; the message lists what there is. Or none is left.
    """
    groups = {benchmark.group for benchmark in benchmarks}
    known = groups | {benchmark.name for benchmark in benchmarks}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no benchmark or group {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    wanted = set(names) or groups
    if isolation is None:
        return tuple(benchmark for benchmark in benchmarks if wanted & {benchmark.name, benchmark.group})
    chosen = [benchmark for benchmark in benchmarks if benchmark.isolation == isolation]
    chosen = [benchmark for benchmark in chosen if wanted & benchmark.names]
    if not chosen:
        raise ValueError(f"none of {', '.join(sorted(wanted))} measures a device with isolation {isolation}")
    return tuple(chosen)
