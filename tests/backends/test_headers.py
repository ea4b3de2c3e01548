"""The parts of a source: every file that it may include."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from trio_accel.backends.base.kit.code_cache import header_parts


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two folders of headers; `a.h` includes `b.h`, which is next to it and includes `a.h` again."""
    for name, text in {
        "one/a.h": '#pragma once\n  #  include /* twice **/ "b.h"\n',
        "one/b.h": '#include "a.h"\n#if 0\n#include <deep/c.h>\n#endif\n',
        "two/deep/c.h": "int c;\n",
        "two/a.h": "int other;\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return [tmp_path / "one", tmp_path / "two"]


SOURCE = '#include "a.h"\n#include <cuda_fp16.h>\nextern "C" __global__ void f() {}\n'


@pytest.mark.parametrize("changed", ["one/a.h", "one/b.h", "two/deep/c.h"])
def test_a_change_of_a_header_changes_the_parts(folders: list[Path], tmp_path: Path, changed: str) -> None:
    before = header_parts(SOURCE, folders=folders)
    assert before == header_parts(SOURCE, folders=folders)
    (tmp_path / changed).write_text((tmp_path / changed).read_text() + "// more")
    assert header_parts(SOURCE, folders=folders) != before


def test_other_files_do_not_count(folders: list[Path], tmp_path: Path) -> None:
    before = header_parts(SOURCE, folders=folders)
    (tmp_path / "two/a.h").write_text("never reached")
    (tmp_path / "one/d.h").write_text("new")
    assert header_parts(SOURCE, folders=folders) == before


def test_a_header_that_turns_up_earlier_changes_the_parts(folders: list[Path], tmp_path: Path) -> None:
    before = header_parts(SOURCE, folders=folders)
    (tmp_path / "one/cuda_fp16.h").write_text("of my own")
    assert header_parts(SOURCE, folders=folders) != before


def test_the_folder_of_the_source_comes_first_for_quotes_only(folders: list[Path], tmp_path: Path) -> None:
    (tmp_path / "b.h").write_text("near")
    quoted, angled = '#include "b.h"', "#include <b.h>"
    near = header_parts(quoted, folder=tmp_path, folders=folders)
    assert near != header_parts(quoted, folders=folders)
    assert near is not None
    assert str(tmp_path / "b.h") in near
    assert header_parts(angled, folder=tmp_path, folders=folders) == header_parts(angled, folders=folders)


def test_headers_before_the_source_count(folders: list[Path]) -> None:
    before = header_parts("", folders=folders, first=["a.h"])
    (folders[0] / "b.h").write_text("changed")
    assert header_parts("", folders=folders, first=["a.h"]) != before


@pytest.mark.parametrize(
    "source",
    [
        "#include HEADER\n",
        "#  include /* which */ HEADER\n",
        '#include "a.h"\n#include_next NEXT\n',
        "#inc\\\nlude HEADER\n",
        "%:include HEADER\n",
        "#if __has_include(HEADER)\n#endif\n",
        '#include "macro.h"\n',
    ],
)
def test_the_includes_of_a_macro_are_unknown(folders: list[Path], source: str) -> None:
    (folders[0] / "macro.h").write_text("#include HEADER\n")
    assert header_parts(source, folders=folders) is None


@pytest.mark.parametrize("source", ['#embed "b.h"', '#if __has_include( "b.h" )', '#inc\\\nlude "b.h"'])
def test_other_ways_to_name_a_header(folders: list[Path], source: str) -> None:
    parts = header_parts(source, folders=folders)
    assert parts is not None
    assert str(folders[0] / "b.h") in parts


def test_strange_names_and_long_comments_are_accepted(folders: list[Path]) -> None:
    odd = "a" * 5000
    parts = header_parts(f'#include "{odd}"\n#include "\0.h"\n', folders=folders)
    assert parts is not None
    assert odd in parts
    begin = time.process_time()
    assert header_parts("/**/ " * 20_000 + "#\n" + "/*" * 20_000, folders=folders) == ()
    assert time.process_time() - begin < 5.0


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_the_includes_of_an_unreadable_header_are_unknown(folders: list[Path]) -> None:
    (folders[0] / "b.h").chmod(0)
    assert header_parts(SOURCE, folders=folders) is None
