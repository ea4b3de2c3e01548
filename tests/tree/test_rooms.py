"""Which tests belong to a change: the folders of its rooms, and of the rooms that import them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import rooms
from layers import CAPABILITIES, DOWNWARDS
from test_layers import modules, part_of

pytestmark = pytest.mark.no_device


def test_each_folder_of_tests_belongs_to_a_room() -> None:
    known = {*rooms.ALL_ROOMS, rooms.EXAMPLES, rooms.DOCS, rooms.BENCHMARKS}
    assert [name for name in rooms.folders() if not {*rooms.rooms_of_folder(name)} <= known] == []
    assert {*rooms.FOLDERS} <= {*rooms.folders(), "gpu", "mutants"}
    assert list((rooms.ROOT / "tests").glob("test_*.py")) == []


def test_each_test_of_the_sample_exists() -> None:
    for test in (rooms.ROOT / "tests" / "mutants" / "sample.txt").read_text(encoding="utf-8").splitlines():
        file, *_, name = test.partition("[")[0].split("::")
        assert f"def {name}(" in (rooms.ROOT / file).read_text(encoding="utf-8"), test


def test_each_room_has_tests() -> None:
    tested = {room for folder in rooms.folders() for room in rooms.rooms_of_folder(folder)}
    # Tests of all rooms above use these.
    assert rooms.ALL_ROOMS - tested == {"_names", "_version", "derivatives", "expressions"}


def test_files_are_in_the_rooms_of_the_table_of_imports() -> None:
    for module in modules():
        file = module.name.replace(".", "/") + ("/__init__.py" if module.is_package else ".py")
        assert rooms.room_of(file) == (part_of(module.name) or rooms.FACADE), file


def test_rooms_that_import_a_room_are_those_of_the_sources() -> None:
    """By imports as they stand, each room above is found from the room below."""
    for module in modules():
        for _, name in module.imports():
            below, above = part_of(name) if name.startswith("trio_accel") else "", module.part
            if below and below != above and above in DOWNWARDS:
                assert above in rooms.importing(below), (module.name, name)


@pytest.mark.parametrize(
    ("file", "own", "others"),
    [
        ("trio_accel/signal/_filters.py", {"signal"}, {"gradients", "train", "public"}),
        ("trio_accel/http/_edge.py", {"http"}, {"telemetry", "public"}),
        # Nearly all rooms import it, so none of these is added.
        ("trio_accel/devices/engine/_context.py", {"devices"}, set()),
        (
            "trio_accel/backends/cpu/libraries/arrays.py",
            {"backends", "compiled"},
            {*CAPABILITIES, "public"},
        ),
        ("tests/linalg/test_qr.py", {"linalg"}, set()),
        ("examples/generate/serve.py", {"generate", "examples", "encode", "finetune", "simulations"}, set()),
        ("docs/guide/deploy.md", {"docs"}, set()),
        ("README.md", {"docs"}, set()),
        ("pyproject.toml", set(), set()),
    ],
)
def test_a_change_of_one_file(file: str, own: set[str], others: set[str]) -> None:
    assert rooms.folders_of([file]) == (sorted(own | {"tree"}), sorted(others))


def test_changed_files_differ_from_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@localhost")
        command = ("git", "-C", str(tmp_path), *identity, *arguments)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(rooms, "ROOT", tmp_path)
    git("init", "-q", "-b", "main")
    for name in ("kept", "changed", "removed"):
        (tmp_path / name).write_text(name)
    git("add", "-A")
    git("commit", "-qm", "first", "--date=2020-01-01T00:00:00")
    first = git("rev-parse", "HEAD")
    (tmp_path / "changed").write_text("more")
    git("rm", "-q", "removed")
    git("commit", "-qam", "second")
    (tmp_path / "new").write_text("new")
    assert rooms.changed_files(first) == ["changed", "new", "removed"]
    assert rooms.changed_files("HEAD") == ["new"]
    # The committer's dates are of today, so the first commit is the only one to compare with.
    assert rooms.base() == first
    git("tag", "v1", "HEAD")
    assert rooms.base() == "v1"
    git("tag", "-d", "v1")
    git("update-ref", "refs/remotes/origin/main", first)
    assert rooms.base() == first
