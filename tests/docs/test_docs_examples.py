"""The programs in the documentation run and print the output on the pages.

The Python blocks of a page run in order, in one namespace. The output of a block is the text block after it.
A comment on the line above a block may change that:

* ``<!-- not run -->``: a fragment of a program;
* ``<!-- from examples/name.py -->``: a part of that file, which has a test of its own;
* ``<!-- run by pytest -->``: a file of tests, with the fixtures of `trio_accel.testing.fixtures`.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import itertools
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import PAGES, REFERENCE, ROOT, Block, blocks, name_of

pytestmark = pytest.mark.docs

# The reference has signatures in place of programs.
PAGES_WITH_PROGRAMS = [page for page in PAGES if page.parent != REFERENCE]
MARKS = ("", "not run", "run by pytest")
FROM = "from "


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def expected(page: Path) -> Iterator[tuple[Block, str]]:
    """Each block that runs, with its required output."""
    for block, following in itertools.pairwise([*blocks(page), Block("", 0, "", "", "")]):
        if block.language == "python" and not block.mark:
            # Only a word such as "prints" is between a program and its output.
            is_output = following.language == "text" and following.before in {"", "prints", "It prints"}
            yield block, following.text if is_output else ""


@pytest.mark.parametrize(
    "page", [page for page in PAGES_WITH_PROGRAMS if any(True for _ in expected(page))], ids=name_of
)
def test_the_programs_of_a_page_print_the_shown_output(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux" and 'isolation="process"' in page.read_text(encoding="utf-8"):
        pytest.skip("there are worker processes on Linux only")
    module = types.ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for block, output in expected(page):
        # With as many lines before it, a traceback names the line in the page.
        code = compile("\n" * block.number + block.text, str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, module.__dict__)
        is_right = doctest.OutputChecker().check_output(output, printed.getvalue(), doctest.ELLIPSIS)
        assert is_right, f"{page}:{block.number} printed\n{printed.getvalue()}"


@pytest.mark.parametrize(
    ("page", "block"),
    [
        (page, block)
        for page in PAGES_WITH_PROGRAMS
        for block in python_blocks(page)
        if block.mark == "run by pytest"
    ],
    ids=lambda value: name_of(value) if isinstance(value, Path) else str(value.number),
)
def test_the_tests_of_a_page_pass(page: Path, block: Block, tmp_path: Path) -> None:
    (tmp_path / "test_page.py").write_text(block.text, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "trio_accel.testing.fixtures",
        "-o",
        "trio_mode=true",
    ]
    done = subprocess.run(
        [*command, "-W", "error", "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, f"{page}:{block.number}\n{done.stdout}{done.stderr}"


@pytest.mark.skipif(sys.platform != "linux", reason="worker processes are on Linux only")
@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_the_library_of_two_files_works(isolation: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / "guide" / "libraries.md"
    files = [block for block in python_blocks(page) if block.mark == "not run"][:2]
    output = next(block for block in blocks(page) if block.language == "text")
    for name, block in zip(("vectors.py", "areas.py"), files, strict=True):
        (tmp_path / name).write_text(block.text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "areas.py", isolation],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == (output.text, "", 0)


def test_every_mark_is_known() -> None:
    unknown = [
        f"{name_of(page)}:{block.number}: {block.mark}"
        for page in PAGES_WITH_PROGRAMS
        for block in python_blocks(page)
        if block.mark not in MARKS and not block.mark.startswith(FROM)
    ]
    assert unknown == []


def test_quotations_of_a_file_are_in_it() -> None:
    shown = [
        (page, block) for page in PAGES_WITH_PROGRAMS for block in blocks(page) if block.mark.startswith(FROM)
    ]
    assert shown != []
    for page, block in shown:
        source = (ROOT / block.mark.removeprefix(FROM)).read_text(encoding="utf-8")
        assert block.text in source, (
            f"{name_of(page)}:{block.number} is not in {block.mark.removeprefix(FROM)}"
        )
