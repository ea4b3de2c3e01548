"""Results as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ._harness import Figure, Goal, Plan, Result
from ._statistics import Summary

__all__ = ["HEADER", "cells", "describe_plan", "goal_text", "number", "table"]

HEADER = ("name", "ours", "peer", "ratio", "goal", "verdict")

_RETAKEN = (
    "\nA pair during which something else slowed a processor down does not count and is taken once more, "
    "until that has taken {:g} s of a comparison. Behind a ratio, +n: so many were; n disturbed: so many "
    "count all the same."
)


def table(results: Sequence[Result]) -> str:
    """Draw one line per result: medians, with the quartiles of all measurements in brackets."""
    rows = [HEADER, *(cells(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def cells(result: Result, *, has_quartiles: bool = True) -> tuple[str, ...]:
    """Write a result as one cell for each column of `HEADER`."""
    cell = partial(_cell, has_quartiles=has_quartiles)
    verdict = str(result.verdict)
    if result.reason:
        verdict += f": {result.reason}"
    if result.goal is None or result.goal.figure is not Figure.DIFFERENCE:
        compared = cell(result.ratio, "×")
    else:
        compared = cell(result.difference, f"{result.unit} more")
    return (
        result.name,
        cell(result.ours, result.unit),
        cell(result.peer, result.unit),
        compared + _takes(result),
        goal_text(result.goal, result.unit),
        verdict,
    )


def describe_plan(plan: Plan) -> str:
    """Say in a sentence how it is measured."""
    if plan.is_quick:
        return f"A quick look, no measurement: medians of {plan.pairs}, at {plan.scale:.0%} of the work."
    return (
        f"Medians of {plan.pairs} measurements of ours and of the peer each, taken in turns [quartiles]; "
        "a ratio is ours over the peer, pair by pair."
        + (_RETAKEN.format(plan.patience) if plan.patience else "")
    )


def _takes(result: Result) -> str:
    """Say how many pairs were taken once more, and how many should have been."""
    retaken = f" +{result.retaken}" if result.retaken else ""
    return f"{retaken}, {result.disturbed} disturbed" if result.disturbed else retaken


def _cell(summary: Summary | None, unit: str, *, has_quartiles: bool) -> str:
    if summary is None:
        return "-"
    has_quartiles = has_quartiles and summary.count > 1
    spread = f" [{number(summary.lower)}, {number(summary.upper)}]" if has_quartiles else ""
    return f"{number(summary.median)}{spread} {unit}"


def goal_text(goal: Goal | None, unit: str) -> str:
    """Say a goal in a few characters."""
    if goal is None:
        return "-"
    bound = f"at most {number(goal.most)}" if goal.most is not None else ""
    if goal.least is not None:
        bound += f"at least {number(goal.least)}"
    return f"{bound} {({Figure.RATIO: '×', Figure.DIFFERENCE: f'{unit} more'}).get(goal.figure, unit)}"


def number(value: float) -> str:
    """Three significant digits or decimals, and no exponent for any size that a benchmark has."""
    magnitude = abs(value)
    if magnitude >= 10_000:
        return f"{round(value, -2 if magnitude < 100_000 else -3):,.0f}".replace(",", " ")
    if magnitude >= 100:
        return f"{value:.0f}"
    if magnitude >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if magnitude >= 1 else f"{value:.3f}"
