"""Hold the plug-in to the package's tests: ``python plugins/torch/conformance.py [OPTIONS] [OF PYTEST]``.

Nothing has to be installed but PyTorch and what the tests need, because the script writes the metadata of an
installation to a temporary folder. ``--kind cuda`` tests the first card. The last lines are the names of the
failed tests and the counts. ``--log FILE`` gets the failures in full as they come, so that they are kept if
the run is ended.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "write_metadata"]

_PLUG_IN = Path(__file__).parent
_ROOT = _PLUG_IN.parents[1]
_FOLDERS = (
    "arrays",
    "backends",
    "fft",
    "jit",
    "linalg",
    "ndimage",
    "random",
    "signal",
    "spatial",
    "tables",
    "tensor",
)
_WITHOUT = {"no_device", "one_backend"}
_FILE = "TRIO_ACCEL_FAILURES"
"""Variable with the path of the log."""


def _modules() -> list[str]:
    """Return the modules of the folders, and the ones elsewhere that are marked `conformance`."""
    found: list[str] = []
    for file in sorted((_ROOT / "tests").rglob("test_*.py")):
        marks = set(re.findall(r"\bmark\.(\w+)", file.read_text(encoding="utf-8")))
        is_of_folder = file.relative_to(_ROOT / "tests").parts[0] in _FOLDERS and not marks & _WITHOUT
        if is_of_folder or "conformance" in marks:
            found.append(str(file.relative_to(_ROOT)))
    return [*found, "tests/plug_ins"]


def write_metadata(folder: Path) -> None:
    """Write what an installation of the plug-in writes, so that its entry point is found."""
    about = folder / "trio_accel_torch-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: trio-accel-torch\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[trio_accel.backends]\ntorch = trio_accel_torch:TorchBackend\n")


def pytest_runtest_logreport(report: Any) -> None:
    """Append a failure to the log; pytest calls this in the process that collects the reports."""
    file = os.environ.get(_FILE)
    if file and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(file).open("a", encoding="utf-8") as log:
            log.write(
                f"\n==== {report.nodeid} ({report.when}, {report.duration:.1f} s)\n{report.longreprtext}\n"
            )


def main(arguments: Sequence[str]) -> int:
    """Run the tests, and return the exit code of pytest."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--kind", default="cpu", choices=["cpu", "cuda", "xpu", "mps"])
    parser.add_argument("--log", type=Path)
    known, others = parser.parse_known_args(arguments)
    names_tests = any(other.startswith("tests/") for other in others)
    env = {
        **os.environ,
        "TRIO_ACCEL_BACKEND": "torch",
        "TRIO_ACCEL_TORCH": known.kind,
        "OMP_NUM_THREADS": "1",
    }
    plugins: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        write_metadata(Path(folder))
        searched = [str(_PLUG_IN), folder, str(_ROOT), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, searched))
        if known.log is not None:
            env[_FILE] = str(known.log.absolute())
            plugins = ["-p", "conformance"]
        command = [sys.executable, "-m", "pytest", *plugins, *([] if names_tests else _modules()), *others]
        return subprocess.run(command, env=env, cwd=_ROOT, check=False).returncode  # noqa: S603  # pytest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
