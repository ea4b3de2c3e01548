"""The tables of functions by dtype and backend, made of the declarations and of what the tests have recorded.

`docs/operations.json` is written by `pytest --record-operations`; see `docs/reference/operations.md`.
"""

from __future__ import annotations

import functools
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import trio_accel as ta
from trio_accel.devices import DECLARED

RECORDS = Path(__file__).parent / "operations.json"
_COLUMNS = 116
PASSED, REFUSED, NOT_RUN = "✓", "-", ""
CAPABILITIES = {
    "linalg": "Linear algebra",
    "arrays": "Functions of arrays",
    "fft": "Fourier transforms",
    "random": "Random numbers",
    "sparse": "Sparse matrices",
    "nn": "Neural networks",
    "tensor": "Tensors",
}
"""Packages with a table, and their titles."""


def records() -> dict[str, dict[str, Any]]:
    """What was recorded, by the names of backends: of several runs on one, what any of them has passed."""
    found: dict[str, list[dict[str, Any]] | dict[str, Any]] = json.loads(RECORDS.read_text(encoding="utf-8"))
    return {name: _joined(runs if isinstance(runs, list) else [runs]) for name, runs in found.items()}


def _joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    operations: dict[str, dict[str, str]] = {}
    for name in sorted({name for run in runs for name in run["operations"]}):
        cells = [run["operations"][name] for run in runs if name in run["operations"]]
        passed, refused = (
            {dtype for one in cells for dtype in one[kind].split()} for kind in ("passed", "refused")
        )
        told = (passed, refused - passed)
        operations[name] = dict(zip(("passed", "refused"), map(_in_order, told), strict=True))
    return {"runs": runs, "operations": operations}


def _in_order(dtypes: set[str]) -> str:
    return " ".join(str(dtype) for dtype in ta.DType if str(dtype) in dtypes)


@functools.cache
def public_functions() -> Mapping[str, tuple[Any, Any]]:
    """The functions that compute, such as ``"linalg.matmul"``, each with what has it."""
    found: dict[str, tuple[Any, Any]] = {}
    for capability in CAPABILITIES:
        module = import_module(f"trio_accel.{capability}")
        names = {name: getattr(module, name) for name in module.__all__}
        owners = [
            (module, names),
            *[(cls, dict(inspect.getmembers(cls))) for cls in names.values() if cls is ta.random.Generator],
        ]
        for owner, those in owners:
            for name, function in those.items():
                if hasattr(function, "asked") and not name.startswith("_"):
                    found[f"{capability}.{name}"] = owner, function
    return found


def rows_of(capability: str, record: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The cells of a capability on one backend: by function, then by dtype."""
    names = [name for name in public_functions() if name.startswith(f"{capability}.")]
    return {name: _cells(name, record) for name in names}


def _cells(name: str, record: Mapping[str, Any]) -> dict[str, str]:
    """The cells of a function: nothing that did not pass shows as passed, whatever was declared."""
    found = record["operations"].get(name, {})
    passed, refused = found.get("passed", "").split(), found.get("refused", "").split()
    allowed = DECLARED[name].declaration.dtypes if name in DECLARED else ()
    return {
        str(dtype): PASSED
        if str(dtype) in passed
        else REFUSED
        if str(dtype) in refused or (allowed and dtype not in allowed)
        else NOT_RUN
        for dtype in ta.DType
    }


def run_of(record: Mapping[str, Any]) -> str:
    """Tell when, where and with what the tests ran, in a paragraph for each run."""
    return "\n\n".join(map(_told, record["runs"]))


def _told(run: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    text = f"{run['date']}, {run['hardware']}, {run['system']}. {run['tests']} tests. {versions}."
    return textwrap.fill(text, _COLUMNS, break_on_hyphens=False)


def tables() -> Iterator[str]:
    """The tables of all backends, as paragraphs of Markdown."""
    for backend, record in records().items():
        yield f"## {backend.upper()}"
        yield run_of(record)
        for capability, title in CAPABILITIES.items():
            rows = rows_of(capability, record)
            shown = [str(dtype) for dtype in ta.DType if _passes(rows, str(dtype))]
            heads = [*(f"`{dtype}`" for dtype in shown), "gradient"]
            lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
            for name, cells in rows.items():
                function = name.partition(".")[2]
                told = [*(cells[dtype] for dtype in shown), _gradient(name)]
                lines.append(f"| `{function}` | {' | '.join(told)} |")
            yield f"### {title} on {backend.upper()}"
            yield "\n".join(lines)
    yield from refusals()


def _gradient(name: str) -> str:
    """The word that says whether a function has a gradient; nothing for methods of generators."""
    return ta.gradients.words().get(name, ("", ""))[0]


def refusals() -> Iterator[str]:
    """The functions without a gradient, by the reasons, as a table of Markdown."""
    yield "## Functions without a gradient"
    reasons: dict[str, list[str]] = {}
    for name, (_, reason) in ta.gradients.words().items():
        if reason:
            reasons.setdefault(reason, []).append(f"`{name}`")
    lines = [f"| {reason} | {', '.join(names)} |" for reason, names in reasons.items()]
    yield "\n".join(["| reason | functions |", "|---|---|", *lines])


def _passes(rows: Mapping[str, Mapping[str, str]], dtype: str) -> bool:
    return any(cells[dtype] == PASSED for cells in rows.values())
