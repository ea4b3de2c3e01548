"""A release is refused where its tag, version, changelog and citation disagree."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import trio_accel as ta

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    spec = spec_from_file_location("noxfile_of_releases", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree ready for the release of 1.2.3."""
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "README.md").write_text("# Changelog fragments\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 (2026-11-29)\n\nWords.\n")
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.3\n")
    return tmp_path


def test_a_ready_tree_has_no_problems(noxfile: ModuleType, tree: Path) -> None:
    assert noxfile.release_problems("v1.2.3", "1.2.3", tree) == []


@pytest.mark.parametrize(
    ("tag", "version", "told"),
    [
        ("v1.2.4", "1.2.3", "the tag 'v1.2.4' is not 'v1.2.3'"),
        ("1.2.3", "1.2.3", "the tag '1.2.3' is not 'v1.2.3'"),
        ("v1.2.3.dev0", "1.2.3.dev0", "the version '1.2.3.dev0' is not a release"),
        ("v1.3.0", "1.3.0", "CHANGELOG.md has no heading '## 1.3.0 (year-month-day)'"),
        ("v1.3.0", "1.3.0", "CITATION.cff does not have the version 1.3.0"),
    ],
)
def test_a_tag_that_does_not_fit_is_refused(
    noxfile: ModuleType, tree: Path, tag: str, version: str, told: str
) -> None:
    assert told in "\n".join(noxfile.release_problems(tag, version, tree))


def test_a_remaining_fragment_is_refused(noxfile: ModuleType, tree: Path) -> None:
    (tree / "changes" / "+one.added.md").write_text("One.\n")
    (problem,) = noxfile.release_problems("v1.2.3", "1.2.3", tree)
    assert problem == "changes/ still has +one.added.md: run `towncrier build --version 1.2.3`"


def test_the_citation_has_the_version_of_the_package() -> None:
    found = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert found == [ta.__version__]
