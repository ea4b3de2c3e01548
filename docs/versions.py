"""Build the pages of `main` and of each release into one site: `sphinx-polyversion docs/versions.py FOLDER`.

Each version is checked out, installed into an environment of its own, and built by its own `conf.py`, to
which `data_of` hands the names of all versions. A version that cannot be built ends the program with an
error, because a site without it would look complete.
"""

from __future__ import annotations

import venv
from pathlib import Path
from typing import Any, TypeAlias

from sphinx_polyversion.api import apply_overrides
from sphinx_polyversion.driver import DefaultDriver
from sphinx_polyversion.git import Git, GitRef, GitRefType
from sphinx_polyversion.pyvenv import Pip
from sphinx_polyversion.sphinx import SphinxBuilder

MAIN = "main"
RELEASE = r"v\d+\.\d+\.\d+"  # no pre-releases
OUTPUT_DIR = "docs/_build/site"

Driver: TypeAlias = "DefaultDriver[GitRef, Pip, Any]"


def names_of(revisions: Any) -> list[str]:
    """The names of versions: `main`, then releases, newest first."""
    releases = [one for one in revisions if one.type_ == GitRefType.TAG]
    newest_first = sorted(releases, key=lambda one: [int(part) for part in one.name[1:].split(".")])[::-1]
    return [MAIN, *(one.name for one in newest_first)]


def data_of(driver: Driver, revision: GitRef, environment: Pip) -> Any:
    """Return the values for `conf.py` of a version."""
    return {"versions": names_of(driver.targets), "current_version": revision.name}


def root_of(driver: Driver) -> dict[str, str]:
    """Return the values for the page of the root: the version that it leads to."""
    return {"newest": [*names_of(driver.builds), MAIN][1]}


apply_overrides(globals())
root = Git.root(Path(__file__).parent)
driver: Driver = DefaultDriver(
    root,
    OUTPUT_DIR,
    vcs=Git(branch_regex=MAIN, tag_regex=RELEASE),
    builder=SphinxBuilder("docs", args=["-qW", "--keep-going"]),
    env=Pip.factory(
        venv=Path(".venv-of-docs"),
        args=["-q", "-e", ".[docs]"],
        creator=venv.EnvBuilder(with_pip=True).create,
        temporary=True,
    ),
    data_factory=data_of,
    root_data_factory=root_of,
    template_dir=root / "docs" / "_site",
)
driver.run(sequential=True)
if missing := {one.name for one in driver.targets} - {one.name for one in driver.builds}:
    raise SystemExit(f"these versions could not be built: {', '.join(sorted(missing))}")
