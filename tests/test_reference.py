"""The reference pages that list names one by one list all of them."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import trio_accel.actors
import trio_accel.testing

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


@pytest.mark.parametrize(
    ("module", "pages"),
    [(trio_accel.actors, ("actors.md", "errors.md")), (trio_accel.testing, ("testing.md",))],
    ids=["actors", "testing"],
)
def test_every_public_name_has_an_entry_and_every_entry_a_name(
    module: ModuleType, pages: tuple[str, ...]
) -> None:
    text = "\n".join((REFERENCE / page).read_text(encoding="utf-8") for page in pages)
    listed = re.findall(rf"^\.\. auto\w+:: {re.escape(module.__name__)}\.(\w+)", text, re.MULTILINE)
    # Type aliases have no docstring to take.
    listed += re.findall(
        rf"^\.\. py:data:: (\w+)\n   :module: {re.escape(module.__name__)}$", text, re.MULTILINE
    )
    assert sorted(listed) == sorted(module.__all__)
