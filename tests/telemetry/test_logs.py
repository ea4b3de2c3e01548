"""Records carry keys and values, for whoever does not read prose."""

from __future__ import annotations

import ast
import functools
import json
import logging
import re
from pathlib import Path

import attrs
import pytest

import trio_accel as ta

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide" / "telemetry.md"


@attrs.frozen
class Note(ta.Message["Log"]):
    text: str


class Log(ta.Actor):
    @ta.handles(Note)
    async def note(self, message: Note) -> None:
        raise ValueError(message.text)


@functools.cache
def keys_in_the_package() -> dict[str, str]:
    """The keys of all `extra` of records, including `warn_untold`, each with a file that has it."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "trio_accel").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "extra" in text or "warn_untold" in text else ():
            dicts: list[ast.expr] = []
            if isinstance(node, ast.keyword) and node.arg == "extra":
                dicts.append(node.value)
            elif isinstance(node, ast.Assign) and "extra" in ast.unparse(node.targets[0]).split(", "):
                dicts += node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            elif isinstance(node, ast.FunctionDef) and node.name == "_extra":
                dicts += [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "warn_untold":
                more = [one.arg for one in node.keywords if one.arg not in {None, "level"}]
                found |= dict.fromkeys(map(str, more), path.name)
            for one in dicts:
                if isinstance(one, ast.Dict):
                    found |= {str(ast.literal_eval(key)): path.name for key in one.keys if key is not None}
    return found


def test_the_guide_has_all_keys_and_no_others() -> None:
    table = GUIDE.read_text(encoding="utf-8").partition("## Logs")[2].partition("\n## ")[0]
    told = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert told == keys_in_the_package().keys() | {"device", "pid"}


def test_no_key_is_one_of_the_records_own() -> None:
    own = vars(logging.LogRecord("name", logging.INFO, "path", 1, "text", (), None))
    assert not own.keys() & keys_in_the_package().keys()


async def test_a_crash_that_nobody_awaited_is_an_error_with_its_keys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ta.open_system("shop") as system:
        log = await system.spawn(Log, name="log", restart=ta.Restart.TEMPORARY)
        await log.tell(Note("boom"))
        await log.wait_terminated()
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.name == "trio_accel.actors"
    keys = {key: record.__dict__[key] for key in ("path", "pid", "message_type", "incarnation")}
    assert keys == {"path": "shop/log", "pid": None, "message_type": "Note", "incarnation": 0}
    assert record.exc_info is not None
    assert json.dumps(keys)


async def test_a_loss_has_its_device_and_generation(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trio_accel.devices")
    async with ta.open_system("shop") as system, system.open_device("cpu") as device:
        await device.put([1.0])
        ta.testing.poison(device, "for the test")
        with pytest.raises(ta.ContextPoisonedError):
            await device.put([1.0])
        await device.put([1.0])
    [lost] = [record for record in caplog.records if "lost its context" in record.getMessage()]
    assert lost.levelno == logging.WARNING
    keys = {key: lost.__dict__[key] for key in ("device", "generation", "losses")}
    assert keys == {"device": "shop/cpu:0", "generation": 1, "losses": 1}
