"""``python -m benchmarks.gpu._measure NAMES --json FILE``: benchmarks, kept as they come."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import trio

from .. import Machine, Plan, Result, Verdict, describe_plan, select, table
from .._processors import Processors

__all__ = ["main"]

_PATIENCE = 12.0
"""Seconds for pairs that are taken once more, for each comparison."""


async def _measure(names: Sequence[str], plan: Plan, target: Path) -> list[Result]:
    machine, rows = Machine.here(), list[Result]()
    sys.stdout.write(f"{machine}\n{describe_plan(plan)}\n")
    for benchmark in select(names):
        start = time.perf_counter()
        found = await benchmark.measure(plan)
        rows += found
        seconds = time.perf_counter() - start
        sys.stdout.write(f"\n{benchmark.name}: {benchmark.description} ({seconds:.0f} s)\n{table(found)}\n")
        sys.stdout.flush()
        # Whoever ends this process for want of time has what was measured by then.
        await trio.Path(target).write_text(json.dumps(_document(machine, plan, rows), indent=1))
    return rows


def _document(machine: Machine, plan: Plan, rows: Sequence[Result]) -> dict[str, object]:
    return {
        "machine": attrs.asdict(machine),
        "plan": {name: getattr(plan, name) for name in ("pairs", "warmups", "scale", "backend", "patience")},
        "results": [{**attrs.asdict(row), "verdict": row.verdict} for row in rows],
    }


def main() -> int:
    """Measure, and say whether a goal was missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--backend", default="cuda")
    given = parser.parse_args()
    plan = Plan(pairs=given.pairs, scale=given.scale, backend=given.backend)
    if not plan.is_quick and Processors.are_told():
        plan = attrs.evolve(plan, patience=_PATIENCE)
    rows = trio.run(_measure, given.names, plan, given.json)
    return int(any(row.verdict is Verdict.MISSED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
