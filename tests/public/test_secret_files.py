"""Errors of a reader have no bytes of a file that is not its own: a link may lead to a secret."""

from __future__ import annotations

import importlib.util
import inspect
import json
import pickle
import sqlite3
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chosen import ROOT

import trio_accel as ta
from trio_accel import replay, train
from trio_accel.cluster import SqliteStore
from trio_accel.train import _checkpoints

EXAMPLES = ROOT / "examples"
SECRET = "hunter2"
FILES = {
    "text": b"hunter2 and more\n",
    "text that is not UTF-8": b"hunter2 \xf7\xf8 more\n",
    "keys": b"free\nhunter2=hunter2\n",
    "a key with a number": b"hunter2=77777777\n",
    "names twice": b'{"hunter2": 1, "hunter2": 77777777}',
    "a list": b'["hunter2", 77777777, "\\q hunter2"]',
    "a number": b"7" * 5000,
    "a table": b"step,loss\nhunter2,77777777\n",
    "the length of a header": b"\x77\x77\x77\x07\0\0\0\0hunter2",
    "a long header": b"\x77\x77\x77\x77hunter2hunter2",
}
# Numbers of these bytes, which an error may have computed.
NUMBERS = [
    "77777777",
    "0xf7",
    "0xf8",
    str(0x07777777),
    str(int.from_bytes(b"\x77\x77\x77\x77hunt", "little")),
]
NUMBERS += [str(int.from_bytes(data[:8], "little")) for data in FILES.values()]


def _example(folder: str, module: str) -> Any:
    """Import a module of a program in a folder, whose modules import one another by their own names."""
    path = str(EXAMPLES / folder)
    if path not in sys.path:
        sys.path.append(path)
    return importlib.import_module(module)


def _index(path: Path) -> Any:
    return ta.weights.inspect(path.rename(path.with_suffix(".json")))


def _checkpoint(path: Path) -> object:
    path.rename(path.with_name("training.json"))
    return _checkpoints._read_manifest(path.parent)


async def _sqlite(path: Path) -> None:
    store = SqliteStore(path)
    try:
        await store.open()
    finally:
        await store.aclose()


READERS: dict[str, Callable[[Path], Any]] = {
    "weights": ta.weights.inspect,
    "index of weights": _index,
    "adapter": train.Lora(["w"], rank=1).load,
    "checkpoint": _checkpoint,
    "table of a training": lambda path: train.CsvLogger(path).log(1, {"loss": 1.0}),
    "journal": lambda path: list(replay.listing(replay.FileJournal(path))),
    "journal by SQLite": replay.SqliteJournal,
    "store": _sqlite,
    "keys": lambda path: _example("generate", "options").keys_of(path),
    "administration key": lambda path: _example("generate", "options").admin_key_of(path, {}),
    "GGUF": lambda path: _example("generate", "text").load_file(path),
    "configuration": lambda path: _example("encode", "minilm_files")._read_config(path),
    "sentences": lambda path: _example("encode", "minilm_files").read_sentences(path),
}
PACKAGES = {"adapter": "safetensors", "GGUF": "gguf"}


def told(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    """Everything that a user may see of an error: its traceback without the code, and what was printed."""
    lines = [
        line
        for part in traceback.format_exception(error)
        for line in part.splitlines()
        if not line.startswith("  ")
    ]
    captured = capsys.readouterr()
    return "\n".join([repr(error), *lines, captured.out, captured.err])


@pytest.mark.parametrize("content", FILES)
@pytest.mark.parametrize("reader", READERS)
async def test_an_error_has_no_bytes_of_a_strange_file(
    reader: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if reader in PACKAGES and importlib.util.find_spec(PACKAGES[reader]) is None:
        pytest.skip(f"{PACKAGES[reader]} is not installed")
    path = tmp_path / "file"
    path.write_bytes(FILES[content])
    error: BaseException | None = None
    try:
        found = READERS[reader](path)
        if inspect.isawaitable(found):
            await found
    except Exception as raised:  # noqa: BLE001  # every error is looked at
        error = raised
    if error is None:
        # A reader of any text takes some of these as its own.
        assert reader in {"keys", "administration key", "sentences", "configuration", "table of a training"}
        return
    text = told(error, capsys)
    # These errors have the name of the checkpoint, the store or the option instead.
    assert str(path.with_suffix("")) in text or reader in {
        "checkpoint",
        "store",
        "keys",
        "administration key",
    }
    assert [part for part in (SECRET, *NUMBERS) if part in text] == []


def test_an_entry_that_cannot_be_read_is_not_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = pickle.dumps(("part", SECRET))
    damaged = data.replace(SECRET.encode(), SECRET[:-1].encode() + b"\xf7")
    journal = replay.FileJournal(tmp_path / "journal")
    journal.append(damaged)
    with pytest.raises(replay.JournalError, match="cannot be read: UnicodeDecodeError") as caught:
        list(replay.listing(journal))
    text = told(caught.value, capsys)
    assert SECRET[:-1] not in text
    assert "0xf7" not in text


async def test_a_row_of_another_type_is_not_quoted(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store")
    await store.open()
    await store.next_epoch()
    await store.aclose()
    with sqlite3.connect(tmp_path / "store") as database:
        tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
        assert "accel_epoch" in tables
        database.execute("update accel_epoch set epoch = ?", (SECRET,))
    database.close()
    await store.open()
    try:
        with pytest.raises(ta.cluster.StoreError) as caught:
            await store.next_epoch()
    finally:
        await store.aclose()
    assert SECRET not in json.dumps(traceback.format_exception(caught.value, limit=0))
