"""Executed and compiled sources equal golden files, so that a change of their generators is seen."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chosen import SEARCHED

pytestmark = [pytest.mark.one_backend, pytest.mark.no_device]

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
WHAT_TO_DO = "look at the change, and if it is meant: python tests/devices/generated_texts.py --renew"


def test_generated_sources_match_the_golden_files() -> None:
    # In a process of its own: here the operations are declared already.
    ended = subprocess.run(
        [sys.executable, str(HERE / "generated_texts.py")],
        env={**os.environ, "PYTHONPATH": SEARCHED},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    texts: dict[str, str] = json.loads(ended.stdout)
    assert {path.name for path in GOLDEN.iterdir()} == set(texts), WHAT_TO_DO
    for name, text in texts.items():
        kept = (GOLDEN / name).read_text(encoding="utf-8").splitlines()
        found = list(
            difflib.unified_diff(kept, text.splitlines(), f"golden/{name}", "generated", lineterm="")
        )
        assert not found, "\n".join([*found, WHAT_TO_DO])
