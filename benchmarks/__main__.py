"""The command line: ``python -m benchmarks [NAME ...] [--json] [--list] [--quick] [--check]``."""

from __future__ import annotations

import argparse
import enum
import json
import sys
import time
from collections.abc import Sequence

import attrs
import trio

from . import actor_lives, actors, devices, loop_lag
from ._harness import Benchmark, Plan, Result, Verdict
from ._machine import Machine
from ._table import table

__all__ = ["BENCHMARKS", "main", "select"]

BENCHMARKS = (*actors.BENCHMARKS, *actor_lives.BENCHMARKS, *devices.BENCHMARKS, *loop_lag.BENCHMARKS)


def select(names: Sequence[str]) -> tuple[Benchmark, ...]:
    """Find benchmarks by their names or their group's; all of them where no name is given.

    Raises:
        ValueError: A name is neither; the message lists what there is.
    """
    groups = {benchmark.name.partition(".")[0] for benchmark in BENCHMARKS}
    known = groups | {benchmark.name for benchmark in BENCHMARKS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no benchmark or group {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    wanted = set(names) or groups
    return tuple(
        benchmark for benchmark in BENCHMARKS if wanted & {benchmark.name, benchmark.name.partition(".")[0]}
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    options = _parse(arguments)
    try:
        chosen = select(options.names)
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    if options.list:
        width = max(len(benchmark.name) for benchmark in chosen)
        print("\n".join(f"{benchmark.name.ljust(width)}  {benchmark.description}" for benchmark in chosen))
        return 0
    plan = Plan.quick() if options.quick else Plan()
    machine = Machine.here()
    start = time.perf_counter()
    results = tuple(result for benchmark in chosen for result in _run(benchmark, plan))
    if options.json:
        print(json.dumps(_document(machine, plan, results), indent=2))
    else:
        print(f"{machine}\n{_how(plan)}\n\n{table(results)}\n\n{time.perf_counter() - start:.0f} s in all")
    missed = any(result.verdict is Verdict.MISSED for result in results)
    return 1 if options.check and missed else 0


class _Options(argparse.Namespace):
    names: list[str]
    json: bool
    list: bool
    quick: bool
    check: bool


def _parse(arguments: Sequence[str] | None) -> _Options:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure, and print a table of ratios."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a benchmark, or a group such as 'actors'")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--list", action="store_true", help="say what is measured, and measure nothing")
    parser.add_argument(
        "--quick", action="store_true", help="see that all runs; too little to trust the numbers"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    return parser.parse_args(arguments, namespace=_Options())


def _run(benchmark: Benchmark, plan: Plan) -> tuple[Result, ...]:
    print(f"{benchmark.name} ...", file=sys.stderr, flush=True)
    return trio.run(benchmark.run, plan)


def _how(plan: Plan) -> str:
    if plan == Plan.quick():
        return f"A quick look, no measurement: medians of {plan.pairs}, at {plan.scale:.0%} of the work."
    return (
        f"Medians of {plan.pairs} measurements of ours and of the peer each, taken in turns [quartiles]; "
        "a ratio is ours over the peer, pair by pair."
    )


def _document(machine: Machine, plan: Plan, results: Sequence[Result]) -> dict[str, object]:
    rows = [attrs.asdict(result, value_serializer=_plain) | {"verdict": result.verdict} for result in results]
    return {"machine": attrs.asdict(machine), "plan": attrs.asdict(plan), "results": rows}


def _plain(instance: object, attribute: object, value: object) -> object:
    return value.value if isinstance(value, enum.Enum) else value


if __name__ == "__main__":
    sys.exit(main())
