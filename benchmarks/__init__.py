"""Benchmarks: ours beside a peer in the same run. ``python -m benchmarks`` runs them.

They run from a checkout, and no wheel has them. They use the public names of ``trio_accel`` only; their
command line is made of the same parts as the package's.
"""

from ._harness import Benchmark, Figure, Goal, Isolation, Plan, Result, Verdict
from ._machine import Machine
from ._selection import BENCHMARKS, select
from ._statistics import Summary
from ._table import HEADER, cells, describe_plan, table

__all__ = [
    "BENCHMARKS",
    "HEADER",
    "Benchmark",
    "Figure",
    "Goal",
    "Isolation",
    "Machine",
    "Plan",
    "Result",
    "Summary",
    "Verdict",
    "cells",
    "describe_plan",
    "select",
    "table",
]
