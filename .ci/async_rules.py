"""flake8-async, whose slow half is left out for files where it finds nothing; takes its arguments.

That half walks a concrete syntax tree four times, with all positions: nine tenths of the time. One of the
rules that are on is there, ASYNC101, about `yield` in a nursery or a cancel scope, and the comments that
silence the others are read there. A file with such a `yield` is checked whole; the comments of others are
read here.
"""

from __future__ import annotations

import ast
import re
import sys
from typing import Any

import flake8_async

Whole = flake8_async.Flake8AsyncRunner_cst
_SCOPES = re.compile(r"nursery|CancelScope|move_on|fail_a|timeout|TaskGroup|task_group")
_SILENCED = re.compile(r"# noqa(?:: ?(?P<codes>[A-Z]+\d+(?:[, ]+[A-Z]+\d+)*))?", re.IGNORECASE)


class CommentsAlone:
    """Finds nothing, and which lines silence which rules."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.noqas: dict[int, set[str]] = {}

    def run(self) -> list[Any]:
        """Read the comments."""
        for number, line in enumerate(self.module.code.splitlines(), 1):
            if found := _SILENCED.search(line):
                self.noqas[number] = set(re.findall(r"\w+", found["codes"] or ""))
        return []


def yields_in_a_scope(code: str) -> bool:
    """Tell whether a file may break ASYNC101: a `yield` is in a block that looks like such a scope."""
    return any(
        isinstance(inner, (ast.Yield, ast.YieldFrom))
        for outer in ast.walk(ast.parse(code))
        if isinstance(outer, (ast.With, ast.AsyncWith))
        and any(_SCOPES.search(ast.unparse(item)) for item in outer.items)
        for inner in ast.walk(outer)
    )


def runner(options: Any, module: Any) -> Any:
    """What checks the concrete syntax tree of a file."""
    return Whole(options, module) if yields_in_a_scope(module.code) else CommentsAlone(module)


flake8_async.Flake8AsyncRunner_cst = runner
sys.exit(flake8_async.main())
