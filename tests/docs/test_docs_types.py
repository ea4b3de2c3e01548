"""The programs in the documentation pass mypy with the project's strict settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, REFERENCE, ROOT, blocks

MARKS = ("", "run by pytest")


def extracted(page: Path) -> str:
    """The programs of a page, each line where it is in the page."""
    lines = [""] * (page.read_text(encoding="utf-8").count("\n") + 1)
    for block in blocks(page):
        if block.language == "python" and block.mark in MARKS:
            for number, line in enumerate(block.text.splitlines(), block.number):
                lines[number] = line
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_programs_of_the_pages_are_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    files: dict[str, Path] = {}
    for page in PAGES:
        text = "" if page.parent == REFERENCE else extracted(page)
        if text.strip():
            # A name without a module, so that no page hides a package.
            name = "page_" + re.sub(r"\W", "_", page.relative_to(ROOT).with_suffix("").as_posix())
            files[f"{name}.py"] = page
            (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    assert len(files) > 5
    # Programs of one page define the same names, one after the other.
    options = ["--disable-error-code=no-redef", "--config-file", str(ROOT / "pyproject.toml"), "--no-pretty"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *(str(tmp_path / name) for name in files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line.replace(f"{tmp_path}/", "") for line in done.stdout.splitlines() if ": error: " in line]
    assert errors == [], done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
