"""The package and the code next to it keep flake8-async's rules, with our list of blocking calls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.lint, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
# Calls that block on a device or on a vendor library's planning: in async code they hold up the Trio loop.
# The left side is a pattern for the call as it is written; the right side must not contain a comma.
BLOCKING_CALLS = {
    "*.cuCtxSynchronize": "an event and the completion of its stream",
    "*.cuStreamSynchronize": "an event and the completion of its stream",
    "*.cuEventSynchronize": "the completion of the event's stream",
    "*.cudaDeviceSynchronize": "an event and the completion of its stream",
    "*.cudaStreamSynchronize": "an event and the completion of its stream",
    "*.cuMemcpyDtoH": "cuMemcpyDtoHAsync on a stream",
    "*.cuMemcpyHtoD": "cuMemcpyHtoDAsync on a stream",
    "*.nvrtcCompileProgram": "trio.to_thread.run_sync",
    "*.sync": "the completion of the stream or event",
    "*thread.join": "the completion that the thread reports",
}
RULES = (
    "--enable=ASYNC",
    # 9: optional rules, off unless asked for; they want of each private helper the checkpoint that its public
    # caller has. 114 and 128 follow `task_status` by its name and lose it where it is handed on to a helper.
    # 124: a handler of an actor is `async def`, whether it awaits or not.
    "--disable=ASYNC9,ASYNC114,ASYNC124,ASYNC128",
)
# Functions of arrays: they await operations and each other, and start, cancel and catch nothing.
OF_FUNCTIONS = {"arrays", "expressions", "fft", "linalg", "nn", "random", "signal", "sparse", "tensor"}
# A file without one of these has nothing that the rules are about.
ASYNC_WORDS = re.compile(r"\basync\b|\btrio\b|\bBaseException\b|\bexcept\s*:")
# This many processes at once are worth their starts.
PARTS = 4


def _files(*folders: Path) -> list[Path]:
    files = [file for folder in folders for file in folder.rglob("*.py")]
    chosen = [file for file in files if ASYNC_WORDS.search(file.read_text(encoding="utf-8"))]
    return sorted(chosen, key=lambda file: (file.stat().st_size, file))


def _folders(*, of_functions: bool) -> list[Path]:
    folders = [path for path in sorted((ROOT / "trio_accel").iterdir()) if path.is_dir()]
    return [path for path in folders if (path.name in OF_FUNCTIONS) is of_functions]


def _findings(files: list[Path]) -> str:
    calls = ",".join(f"{call}->{instead}" for call, instead in BLOCKING_CALLS.items())
    # They make async context managers.
    makers = "--transform-async-generator-decorators=opens,leavable_context"
    command = [".ci/async_rules.py", *RULES, f"--async200-blocking-calls={calls}", makers, *map(str, files)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}" if done.returncode else ""


# By turns in order of size, so that all parts take as long.
@pytest.mark.parametrize("part", range(PARTS))
def test_concurrent_code_keeps_the_rules(part: int) -> None:
    files = _files(*_folders(of_functions=False), ROOT / "examples", ROOT / "benchmarks")[part::PARTS]
    assert files
    assert _findings(files) == ""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_tests_and_functions_of_arrays_keep_the_rules(part: int) -> None:
    """The rules that `lint` leaves to ruff's async rules: the others find little there."""
    files = _files(*_folders(of_functions=True), ROOT / "tests")[part::PARTS]
    assert files
    assert _findings(files) == ""


def test_a_call_that_blocks_is_found(tmp_path: Path) -> None:
    file = tmp_path / "held.py"
    file.write_text(
        "import driver\n\n\nasync def held() -> None:\n    driver.cuCtxSynchronize()\n", encoding="utf-8"
    )
    assert "ASYNC200" in _findings([file])
