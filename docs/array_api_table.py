"""The tables of the array API standard: what its suite and its callers have recorded, and what is not there.

`docs/array_api.json` is written by `tests/interop/array_api_suite.py`, `docs/array_api_callers.json` by
`tests/interop/array_api_callers.py`; see `docs/reference/interop.md`.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SUITE = Path(__file__).parent / "array_api.json"
CALLERS = Path(__file__).parent / "array_api_callers.json"
REASONS: Mapping[str, str] = {}
"""Why a function of the standard is not there."""
DEVIATIONS: Mapping[str, str] = {
    r"\[(floor_divide|__i?floordiv__)\(.*infinity": (
        "When this was recorded, the quotient of infinite numbers went with the remainder, as in Python and "
        "NumPy. By now it is rounded as the standard prefers."
    ),
    r"test_linalg.py::test_eig": (
        "Eigenvalues of general matrices are `NotSupportedError` on CUDA: cuSOLVER's are not bound yet."
    ),
    r"test_dunder_dlpack": (
        "An array on CUDA is a copy for NumPy, which does not address its memory; the test asks for none."
    ),
}
"""Why tests of the suite fail, by patterns of their names."""
OUTCOMES = ("passed", "failed", "missing", "skipped")
PLACES = ("device", "partly", "host")
_COLUMNS = 116


def records(file: Path) -> dict[str, dict[str, Any]]:
    """What was recorded, by the names of backends."""
    found: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def totals(record: Mapping[str, Any]) -> dict[str, int]:
    """The counts of all areas together, by outcome."""
    return {outcome: sum(one.get(outcome, 0) for one in record["areas"].values()) for outcome in OUTCOMES}


def reason_of(test: str) -> str | None:
    """Why a test of the suite fails, if that is known."""
    return next((reason for pattern, reason in DEVIATIONS.items() if re.search(pattern, test)), None)


def suite_tables() -> Iterator[str]:
    """What the suite said on each backend, as paragraphs of Markdown."""
    for backend, record in records(SUITE).items():
        yield f"### The suite on {backend.upper()}"
        yield _wrapped(
            f"{record['date']}, {record['hardware']}, {record['system']}. array-api-tests {record['suite']}, "
            f"standard {record['standard']}, {record['examples']} examples of each property. "
            f"{_versions(record)}."
        )
        lines = [f"| area | {' | '.join(OUTCOMES)} |", "|---" * (len(OUTCOMES) + 1) + "|"]
        for area, counts in [*record["areas"].items(), ("together", totals(record))]:
            cells = " | ".join(str(counts.get(outcome, 0)) for outcome in OUTCOMES)
            lines.append(f"| {area.replace('_', ' ')} | {cells} |")
        yield "\n".join(lines)
        reasons = Counter(reason for name in record["failed"] for reason in [reason_of(name)] if reason)
        if reasons:
            rows = [f"| {reason} | {count} |" for reason, count in reasons.items()]
            yield "\n".join(["| why tests fail | tests |", "|---|---|", *rows])
        missing, count = record["missing"], record["functions"]
        yield f"Of the {count} functions of the standard, {len(missing) or 'none'} are not there."
        if missing:
            rows = [f"| `{name}` | {REASONS[name]} |" for name in missing]
            yield "\n".join(["| function | why |", "|---|---|", *rows])


def caller_tables() -> Iterator[str]:
    """Where functions of other libraries were computed, as paragraphs of Markdown."""
    for backend, record in records(CALLERS).items():
        yield f"### Functions on {backend.upper()}"
        yield _wrapped(f"{record['date']}. {_versions(record)}.")
        found: dict[str, dict[str, list[str]]] = {}
        for name, outcome in record["outcomes"].items():
            module, _, function = name.rpartition(".")
            found.setdefault(module, {}).setdefault(outcome, []).append(f"`{function}`")
        lines = ["| module | where | functions |", "|---|---|---|"]
        for module, outcomes in found.items():
            # Errors come last.
            places = sorted(outcomes, key=lambda one: (one not in PLACES, one))
            lines += [f"| `{module}` | {place} | {' '.join(outcomes[place])} |" for place in places]
        yield "\n".join(lines)


def _versions(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in record["versions"].items())


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _COLUMNS, break_on_hyphens=False)
