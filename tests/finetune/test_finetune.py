"""The example that fine-tunes a language model, with random weights of a small size."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chosen import ROOT

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are on Linux only"),
]
PROGRAM = ROOT / "examples" / "finetune" / "finetune.py"


def run(folder: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [
            sys.executable,
            PROGRAM,
            "--random-weights",
            "--quiet",
            "--length",
            "16",
            "--folder",
            folder,
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.timeout(120)
def test_the_perplexity_is_that_of_pytorch_alone(tmp_path: Path) -> None:
    printed = run(tmp_path, "--steps", "6", "--every", "3", "--check")
    assert re.fullmatch(
        r"2 ranks, 6 steps from 0 on, 0 workers lost\n"
        r"validation perplexity 621\.0\d+ before, \d+\.\d+ after\n"
        r"PyTorch alone: \d+\.\d+; largest difference of a loss \de-\d+, of the perplexity \S+: right\n",
        printed,
    )
    assert (tmp_path / "losses.png").stat().st_size > 1000
    assert (tmp_path / "adapter.safetensors").stat().st_size > 1000
    # It goes on with another number of devices.
    printed = run(tmp_path, "--steps", "8", "--devices", "1")
    assert "1 ranks, 2 steps from 6 on, 0 workers lost\n" in printed
    with (tmp_path / "steps.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == [str(number) for number in range(1, 9)]


def test_a_text_that_is_too_short_or_missing(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    assert "the text has 10 tokens, which is less than a piece of 17" in run(
        tmp_path, "--text", str(short), code=2
    )
    assert "No such file" in run(tmp_path, "--text", str(tmp_path / "none.txt"), code=2)
