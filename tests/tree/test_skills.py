"""The files for coding assistants have the common form. Their code runs with the code of the other pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import ROOT, blocks

SKILLS = sorted((ROOT / "docs" / "skills").glob("*/SKILL.md"))


def test_there_is_one_for_each_part() -> None:
    assert [skill.parent.name for skill in SKILLS] == [
        *("actors", "devices", "many-devices", "own-kernels", "programs", "serving", "testing")
    ]


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.parent.name)
def test_a_skill_is_short_and_names_its_purpose(skill: Path) -> None:
    text = skill.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    front = re.match(r"---\nname: ([a-z-]{1,64})\ndescription: (.{40,1024}?)\n---\n", text, re.DOTALL)
    assert front is not None
    assert front[1] == f"trio-accel-{skill.parent.name}"
    assert "trio_accel" in front[2]
    assert [block for block in blocks(skill) if block.language == "python" and block.mark != "not run"]
