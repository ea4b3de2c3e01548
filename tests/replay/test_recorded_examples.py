"""Journals of programs in examples/, replayed by the command line; without contents they have no numbers."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chosen import BACKEND, ROOT

from trio_accel import replay

pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(BACKEND != "cpu", reason="they run on the CPU"),
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are on Linux only"),
]

EXAMPLES = (
    "matmul.py --size 48 --clients 2 --backend cpu",
    "spectrum.py --backend cpu",
    "conjugate_gradient.py --points 12 --backend cpu",
    "digits.py --images 50 --backend cpu",
    "logistic_regression.py --samples 500 --backend cpu",
    "recordings.py --samples 1024 --backend cpu",
    "decay.py",
    "own_program.py --faults 1",
    "heat.py --points 12",
    "digits_cnn.py --rounds 1 --backend cpu",
)
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "PYTHONIOENCODING": "utf-8",
    "OPENBLAS_NUM_THREADS": "1",
}


def record(path: Path, contents: str, example: str) -> None:
    name, *arguments = example.split()
    program = [str(Path(__file__).with_name("record_program.py")), str(path), contents]
    done = subprocess.run(
        [sys.executable, *program, str(ROOT / "examples" / name), *arguments],
        cwd=path.parent,
        env=ENVIRONMENT,
        capture_output=True,
        encoding="utf-8",
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def command(path: Path, *arguments: str, folder: str = "examples") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trio_accel.cli", *arguments[:1], str(path), *arguments[1:]],
        cwd=ROOT / folder,
        env=ENVIRONMENT,
        capture_output=True,
        encoding="utf-8",
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=[each.split(".")[0] for each in EXAMPLES])
def test_a_journal_of_an_example(example: str, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    record(path, "contents", example)
    done = command(path, "replay", "--device", "cpu", "--programs")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.startswith("no difference\n")
    [(operations, compared)] = re.findall(
        r"^(\d+) operations, (\d+) arrays compared", done.stdout, re.MULTILINE
    )
    assert int(operations) > 2
    assert int(compared) > 0
    listed = command(path, "journal")
    assert listed.returncode == 0, listed.stderr
    assert len(re.findall(r"^\d+ [\w.]+", listed.stdout, re.MULTILINE)) >= int(operations)
    found = set(numbers(path))
    assert found
    record(tmp_path / "bare", "bare", example)
    whole = b"".join(replay.FileJournal(tmp_path / "bare").entries())
    assert not [each for each in found if each in whole]
    assert (tmp_path / "bare").stat().st_size < path.stat().st_size


def numbers(path: Path) -> Iterator[bytes]:
    """Pieces of the arrays in a journal, except round numbers: long ones never match by chance."""
    for entry in replay.FileJournal(path).entries():
        plain = pickle.loads(entry)
        contents = [plain[2]] if plain[0] == "part" else [one[2] for one in arrays(plain)]
        for content in contents:
            if isinstance(content, bytes):
                pieces = [content[at : at + 16] for at in range(0, min(len(content), 1 << 12), 16)]
                yield from [piece for piece in pieces if len(set(piece)) > 4]


def arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        if len(value) == 3 and isinstance(value[0], str) and isinstance(value[1], tuple):
            yield value
        for each in value:
            yield from arrays(each)
