"""Runs the consortium's suite of the array API standard, array-api-tests, with a device as the namespace.

    python tests/interop/array_api_suite.py CHECKOUT [--examples N] [--report FILE] [--record FILE] [...]

CHECKOUT is a folder with https://github.com/data-apis/array-api-tests and its submodule. The report has the
outcome and the error of each test. The record has the counts, and replaces the record of the same backend;
the pages show ``docs/array_api.json``. Other arguments are passed to pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter, defaultdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
STANDARD = "2025.12"
BACKEND = os.environ.get("TRIO_ACCEL_BACKEND", "").partition(":")[0] or "cpu"
# The errors of the suite and the namespace for a missing name.
_MISSING = re.compile(
    r"is not there|is not defined in|not found in (array module|\w+ extension|array object)"
)
_WITH = ("trio", "numpy", "scipy", "hypothesis")


class Outcomes:
    """Pytest's report of each test."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take up the report of a test's step: the first that did not pass decides."""
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed", "error": ""})
        if report.outcome != "passed" and test["outcome"] == "passed":
            error = str(report.longrepr)
            crash = getattr(report.longrepr, "reprcrash", None)
            told = crash.message if crash else error
            is_missing = report.failed and _MISSING.search(error)
            test.update(outcome="missing" if is_missing else str(report.outcome), error=told)


def run_suite(checkout: Path, arguments: list[str]) -> dict[str, dict[str, str]]:
    """Run the suite in this process, and return its tests."""
    os.environ.setdefault("ARRAY_API_TESTS_MODULE", "array_api_module.xp")
    os.environ["ARRAY_API_TESTS_VERSION"] = STANDARD
    sys.path[:0] = [str(TESTS), str(checkout)]
    os.chdir(checkout)
    outcomes = Outcomes()
    options = ["-q", "--tb=short", "-p", "no:trio", "-p", "no:cacheprovider", "--disable-deadline"]
    pytest.main([*options, "array_api_tests", *arguments], plugins=[outcomes])
    return outcomes.tests


def record_of(checkout: Path, tests: dict[str, dict[str, str]], examples: int) -> dict[str, Any]:
    """Count the outcomes of each suite module, and return its time, place and versions."""
    import trio_accel as ta

    device = next(one for one in ta.list_devices() if one.backend == BACKEND)
    areas: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, test in tests.items():
        areas[Path(name.partition("::")[0]).stem.removeprefix("test_")][test["outcome"]] += 1
    # The names of the standard are the names of its stubs, which the suite has imported.
    stubs: Any = sys.modules["array_api_tests.stubs"]
    xp: Any = sys.modules["array_api_tests"].xp
    names = {one.__name__: xp for group in stubs.category_to_funcs.values() for one in group}
    names |= {
        f"{part}.{one.__name__}": getattr(xp, part)
        for part, group in stubs.extension_to_funcs.items()
        for one in group
    }
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{device.description}, {device.compute_units} compute units",
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"Python": platform.python_version()} | {one: metadata.version(one) for one in _WITH},
        "standard": STANDARD,
        "suite": _revision(checkout),
        "examples": examples,
        "functions": len(names),
        "missing": sorted(name for name, part in names.items() if not hasattr(part, name.rpartition(".")[2])),
        "areas": {area: dict(sorted(counts.items())) for area, counts in sorted(areas.items())},
        "failed": sorted(name for name, test in tests.items() if test["outcome"] == "failed"),
    }


def _revision(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Run the suite by the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--report", type=Path, default=None)
    parser.add_argument("--record", type=Path, default=None)
    parser.add_argument("--examples", type=int, default=100)
    given, arguments = parser.parse_known_args()
    report, record = (one and one.resolve() for one in (given.report, given.record))
    checkout = given.checkout.resolve()
    tests = run_suite(checkout, [f"--max-examples={given.examples}", *arguments])
    if report is not None:
        report.write_text(json.dumps(tests, indent=1) + "\n", encoding="utf-8")
    if record is not None:
        made = record_of(checkout, tests, given.examples)
        records = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        records[BACKEND] = made
        record.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n", encoding="utf-8")
    counts = Counter(test["outcome"] for test in tests.values())
    sys.stdout.write(f"{dict(counts)}\n")
    sys.exit(not tests or bool(counts["failed"] or counts["missing"]))


if __name__ == "__main__":
    main()
