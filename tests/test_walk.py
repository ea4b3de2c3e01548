"""The walk through the house, as the page tells it, against the way that operations really go."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import trio
import walk_trace

import trio_accel as ta

PAGE = Path(__file__).parents[1] / "docs" / "design" / "walk.md"
PACKAGE = Path(ta.__file__).parent
_ROW = re.compile(r"^\| `([\w/]+\.py)`( \*)? \|", re.MULTILINE)
# Behind some repetitions an operation takes the way that it keeps.
_REPETITIONS = 4
# The most files that an operation may pass.
_MOST = {"inline": 12, "process": 20}

Files = tuple[set[str], set[str]]


def told(heading: str) -> Files:
    """Files of a section of the page: those always passed, and those only sometimes (marked by a star)."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    rows = _ROW.findall(section.partition("\n## ")[0])
    return {name for name, star in rows if not star}, {name for name, star in rows if star}


async def traced(isolation: str, name: str, path: Path) -> set[str]:
    """The files that an operation passes, in all processes."""
    async with ta.open_system("walk") as system:
        options = ta.DeviceOptions(isolation="inline" if isolation == "inline" else "process")
        async with await system.open_device("cpu", options=options) as device:
            operands = [await device.put(np.eye(4)) for _ in range(2)]
            for _ in range(_REPETITIONS):
                await ask(name, operands)
            if isolation == "process":
                await device.ask(walk_trace.Switch())
            walk_trace.start()
            try:
                await ask(name, operands)
            finally:
                files = walk_trace.stop()
            if isolation == "process":
                await device.ask(walk_trace.Switch(str(path)))
                files += json.loads(await trio.Path(path).read_text(encoding="utf-8"))
    return set(files)


async def ask(name: str, operands: list[ta.AccelRef]) -> None:
    if name == "cholesky":
        await ta.linalg.cholesky(operands[0])
    else:
        await ta.linalg.solve(*operands)


@pytest.mark.parametrize("name", ["cholesky", "solve"])
@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_the_page_tells_the_way(isolation: str, name: str, tmp_path: Path) -> None:
    if isolation == "process" and sys.platform != "linux":
        pytest.skip("the CPU backend has worker processes on Linux only")
    files = trio.run(traced, isolation, name, tmp_path / "files.json")
    always, sometimes = told("In one process" if isolation == "inline" else "Through a worker")
    assert files - always - sometimes == set(), "passed, and not on the page"
    assert always - files == set(), "on the page, and not passed; mark what is passed only sometimes"
    assert len(files) <= _MOST[isolation], "a newcomer cannot follow so many"


def test_the_page_names_files_that_are_there() -> None:
    for heading in ("In one process", "Through a worker"):
        always, sometimes = told(heading)
        assert always
        assert not [name for name in always | sometimes if not (PACKAGE / name).is_file()]
