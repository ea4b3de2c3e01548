"""The tables of the array API standard: what the consortium's suite has recorded, and what is not there.

`docs/array_api.json` is written by `tests/interop/array_api_suite.py`; see `docs/reference/interop.md`.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "array_api.json"
REASONS: Mapping[str, str] = {}
"""Why a function of the standard is not there."""
_COLUMNS = 116
_OUTCOMES = ("passed", "failed", "missing", "skipped")


def records() -> dict[str, dict[str, Any]]:
    """What was recorded, by the names of backends."""
    found: dict[str, dict[str, Any]] = json.loads(RECORDS.read_text(encoding="utf-8"))
    return found


def totals(record: Mapping[str, Any]) -> dict[str, int]:
    """The counts of all areas together, by outcome."""
    return {
        outcome: sum(counts.get(outcome, 0) for counts in record["areas"].values()) for outcome in _OUTCOMES
    }


def tables() -> Iterator[str]:
    """The tables of all backends, as paragraphs of Markdown."""
    for backend, record in records().items():
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        yield f"### The suite on {backend.upper()}"
        yield textwrap.fill(
            f"{record['date']}, {record['hardware']}, {record['system']}. array-api-tests {record['suite']}, "
            f"standard {record['standard']}, {record['examples']} examples of each property. {versions}.",
            _COLUMNS,
            break_on_hyphens=False,
        )
        lines = [f"| area | {' | '.join(_OUTCOMES)} |", "|---" * (len(_OUTCOMES) + 1) + "|"]
        for area, counts in [*record["areas"].items(), ("together", totals(record))]:
            cells = " | ".join(str(counts.get(outcome, 0)) for outcome in _OUTCOMES)
            lines.append(f"| {area.replace('_', ' ')} | {cells} |")
        yield "\n".join(lines)
        missing = len(record["missing"])
        yield f"Of the {record['functions']} functions of the standard, {missing} are not there."
        if record["missing"]:
            rows = [f"| `{name}` | {REASONS[name]} |" for name in record["missing"]]
            yield "\n".join(["| function | why |", "|---|---|", *rows])
