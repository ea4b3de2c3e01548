"""Files that lie: an error for each, with the file's name; and never an array of wrong data."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from weight_files import encoded, entry, noise, raw, used

import trio_accel as ta
from trio_accel.weights import _files

HUGE = 1 << 62
U8 = entry("U8", [4], 0, 4)
FOUR = b"\0\1\2\3"
META = "__metadata__"

LIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "too few"),
    "header beyond the file": (raw({"a": U8}, FOUR)[:8], "has 8 bytes, fewer than its header"),
    "header above the limit": (
        (100_000_001).to_bytes(8, "little") + b"{}",
        "header has more than 100000000 bytes",
    ),
    "header without end": (b"\xff" * 16, "more than 100000000 bytes"),
    "header of no bytes": (bytes(8), "does not begin with {"),
    "a list": (raw(b"[]"), "does not begin with {"),
    "a blank first": (raw(b" {}"), "does not begin with {"),
    "no JSON": (raw(b"{'a': 1}"), "not JSON"),
    "half of a JSON": (raw(b'{"a": {'), "not JSON"),
    "two JSON": (raw(b"{}{}"), "not JSON"),
    "no UTF-8": (raw(b'{"\xff": 1}'), "not JSON"),
    "too deep": (raw(b'{"a":' + b"[" * 100_000), "nested too deeply"),
    "a number of many digits": (raw(b'{"a":' + b"9" * 10_000 + b"}"), "not JSON"),
    "a name twice": (raw(b'{"a":%b,"a":%b}' % ((json.dumps(U8).encode(),) * 2), FOUR), "'a' twice"),
    "a field twice": (raw(b'{"a":{"dtype":"U8","dtype":"I8"}}'), "'dtype' twice"),
    "no object": (raw({"a": 3}), "'a' must be an object, got 3"),
    "no dtype": (raw({"a": {"shape": [], "data_offsets": [0, 1]}}, b"x"), "'a' has no dtype"),
    "nothing of a tensor": (raw({"a": {}}), "no data_offsets, dtype, shape"),
    "no such dtype": (raw({"a": entry("F33", [], 0, 1)}, b"x"), "'F33', which is none of the format"),
    "dtype of another type": (raw({"a": entry({}, [], 0, 1)}, b"x"), "a dict, which is none"),  # type: ignore[arg-type]
    "negative shape": (raw({"a": entry("U8", [-2, -2], 0, 4)}, FOUR), "must hold sizes, got -2"),
    "shape of floats": (raw({"a": entry("U8", [4.0], 0, 4)}, FOUR), "4.0 where integers"),
    "shape of truths": (raw({"a": entry("U8", [True], 0, 1)}, b"x"), "must hold sizes, got True"),
    "shape of NaN": (raw({"a": entry("U8", [float("nan")], 0, 4)}, FOUR), "has NaN where"),
    "infinite shape": (raw({"a": entry("U8", [float("inf")], 0, 4)}, FOUR), "has Infinity where"),
    "shape of text": (raw({"a": entry("U8", ["4"], 0, 4)}, FOUR), "must hold sizes, got '4'"),
    "shape that is none": (raw({"a": entry("U8", 4, 0, 4)}, FOUR), "shape must be a list"),
    "shape of many axes": (raw({"a": entry("U8", [1] * 65, 0, 1)}, b"x"), "a list of at most 64"),
    "a huge size": (raw({"a": entry("U8", [1 << 200], 0, 4)}, FOUR), "more than 128 bits"),
    "product that overflows": (raw({"a": entry("U8", [HUGE, 4], 0, 0)}), "more elements than memory"),
    "product that wraps to 4": (raw({"a": entry("U8", [HUGE + 1, 4], 0, 4)}, FOUR), "more elements than"),
    "product beside a zero": (raw({"a": entry("F64", [0, HUGE], 0, 0)}), "more elements than memory"),
    "too few bytes": (raw({"a": entry("F32", [2], 0, 4)}, FOUR), "is not what F32 (2,) takes"),
    "too many bytes": (raw({"a": entry("U8", [3], 0, 4)}, FOUR), "is not what U8 (3,) takes"),
    "a third of a byte": (raw({"a": entry("F4", [3], 0, 1)}, b"x"), "is not what F4 (3,) takes"),
    "offsets backwards": (raw({"a": entry("U8", [4], 4, 0)}, FOUR), "a beginning and an end"),
    "negative offsets": (raw({"a": entry("U8", [4], -4, 0)}, FOUR), "must hold sizes, got -4"),
    "three offsets": (raw({"a": {**U8, "data_offsets": [0, 4, 4]}}, FOUR), "a list of at most 2"),
    "one offset": (raw({"a": {**U8, "data_offsets": [4]}}, FOUR), "a beginning and an end"),
    "beyond the file": (raw({"a": entry("U8", [5], 0, 5)}, FOUR), "ends at byte 5 of the data"),
    "far beyond the file": (raw({"a": entry("U8", [HUGE], 0, HUGE)}, FOUR), "cut off"),
    "overlap": (raw({"a": U8, "b": entry("U8", [3], 1, 4)}, FOUR), "'a' and 'b' overlap"),
    "the same bytes": (raw({"a": U8, "b": U8}, FOUR), "'a' and 'b' overlap"),
    "a hole": (raw({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 3, 4)}, FOUR), "a hole between"),
    "a hole at the beginning": (raw({"a": entry("U8", [2], 2, 4)}, FOUR), "the header and 'a' have a hole"),
    "bytes behind": (raw({"a": U8}, FOUR + b"x"), "1 bytes behind 'a' belong to no tensor"),
    "bytes of nothing": (raw({}, b"x"), "1 bytes behind the header belong to no tensor"),
    "metadata is a list": (raw({META: []}), "must be an object, got a list"),
    "metadata of numbers": (raw({META: {"x": 1}}), "'x' must be text, got 1"),
    "no booleans": (raw({"a": entry("BOOL", [4], 0, 4)}, FOUR), "'a' has bytes that are not booleans"),
    "a boolean of 2": (
        raw({"a": entry("BOOL", [4], 0, 4)}, b"\0\1\2\1"),
        "'a' has bytes that are not booleans",
    ),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_lie_is_an_error_that_names_the_file(device: ta.Device, tmp_path: Path, name: str) -> None:
    content, said = LIES[name]
    path = tmp_path / "lie.safetensors"
    path.write_bytes(content)
    with pytest.raises(ta.weights.WeightsError) as caught:
        await ta.weights.load(device, path)
    text = str(caught.value)
    assert said in text
    assert str(path) in text
    assert len(text) < 400
    assert (await used(device))[1] == 0


async def test_a_file_cut_off_at_any_byte_is_an_error(device: ta.Device, tmp_path: Path) -> None:
    content = encoded({"a": noise((3, 5), "float32"), "b": noise((7,), "bool"), "c": noise((), "int64")})
    path = tmp_path / "cut.safetensors"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ta.weights.WeightsError):
            await ta.weights.load(device, path)
    path.write_bytes(content)
    assert len(await ta.weights.load(device, path)) == 3


async def test_any_byte_of_the_header_changed_is_an_error_or_another_file(
    device: ta.Device, tmp_path: Path
) -> None:
    """Each change by one bit: a loaded array has the shape and dtype of the file, from its own bytes."""
    data = noise((6,), "int16")
    content = encoded({"ab": data}, {"x": "y"})
    path = tmp_path / "bits.safetensors"
    loaded = 0
    for place in range(len(content) - data.nbytes):
        for bit in (0, 2, 5):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            try:
                weights = await ta.weights.load(device, path)
            except (ta.weights.WeightsError, ta.NotSupportedError):
                continue
            loaded += 1
            [array] = weights.values()
            assert (await array.to_host()).tobytes() == data.tobytes()
    assert loaded > 5  # names, the text, and a dtype of the same size


async def test_bytes_at_random_are_an_error(device: ta.Device, tmp_path: Path) -> None:
    path = tmp_path / "noise.safetensors"
    random = np.random.default_rng(7)
    for _ in range(200):
        size = int(random.integers(0, 200))
        head = int(random.integers(0, 64)).to_bytes(8, "little")
        path.write_bytes(head + b"{" + random.bytes(size))
        with pytest.raises(ta.weights.WeightsError):
            await ta.weights.load(device, path)


async def test_unusual_but_valid_headers(device: ta.Device, tmp_path: Path) -> None:
    path = tmp_path / "strange.safetensors"
    right: dict[str, tuple[Any, bytes, int]] = {
        "nothing in it": ({}, b"", 0),
        "metadata alone": ({META: {"": ""}}, b"", 0),
        "no metadata": ({META: None, "a": U8}, FOUR, 1),
        "another order": ({"b": entry("U8", [2], 2, 4), "a": entry("U8", [2], 0, 2)}, FOUR, 2),
        "empty ones": ({"a": entry("F64", [0], 4, 4), "b": U8, "c": entry("F64", [3, 0], 0, 0)}, FOUR, 3),
        "no name": ({"": U8}, FOUR, 1),
        "more fields": ({"a": {**U8, "more": [1, {}]}}, FOUR, 1),
    }
    for header, data, count in right.values():
        path.write_bytes(raw(header, data))
        weights = await ta.weights.load(device, path)
        assert len(weights) == count
        found = [bytes((await array.to_host()).tobytes()) for array in weights.values()]
        assert b"".join(found) == data
    path.write_bytes(raw(json.dumps({"a": U8}).encode() + b"   \n", FOUR))
    assert list(await ta.weights.load(device, path)) == ["a"]


async def test_the_limit_of_the_header_matches_the_limit_of_reading(
    device: ta.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_files, "LONGEST", 64)
    path = tmp_path / "long.safetensors"
    path.write_bytes(raw(b"{}" + b" " * 62))
    assert len(await ta.weights.load(device, path)) == 0
    path.write_bytes(raw(b"{}" + b" " * 63))
    with pytest.raises(ta.weights.WeightsError, match="its header has more than 64 bytes"):
        await ta.weights.load(device, path)


def _many(item: bytes, count: int) -> bytes:
    return b",".join([item] * count)


TINY = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


def _shuffled(count: int) -> bytes:
    order = np.random.default_rng(1).permutation(count)
    texts = [b'"%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}' % (n, n, n + 1) for n in order]
    return b"{%b}" % b",".join(texts)


# Slowly read headers, and their errors; for the valid ones, the number of tensors.
LONG: dict[str, tuple[Callable[[], bytes], str | int]] = {
    "empty lists": (lambda: b'{"a":[%b]}' % _many(b"[]", 3_000_000), "more than 262144"),
    "empty texts": (lambda: b'{"a":[%b]}' % _many(b'""', 260_000), "got a list"),
    "lists": (lambda: b'{"a":[%b]}' % _many(b"[]", 130_000), "got a list"),
    "names": (lambda: b"{%b}" % b",".join(b'"%d":0' % n for n in range(260_000)), "must be an object"),
    "long numbers": (lambda: b'{"a":[%b]}' % _many(b"9" * 4000, 8000), "got a list"),
    "many tensors": (lambda: b"{%b}" % b",".join(b'"%d":%b' % (n, TINY) for n in range(30_000)), 30_000),
    "tensors in any order": (lambda: _shuffled(32_000), 32_000),
    "too many tensors": (
        lambda: b"{%b}" % b",".join(b'"%d":%b' % (n, TINY) for n in range(400_000)),
        "32768 tensors",
    ),
}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", LONG)
async def test_the_loop_continues_while_a_long_header_is_read(tmp_path: Path, name: str) -> None:
    make, said = LONG[name]
    path = tmp_path / "long.safetensors"
    path.write_bytes(raw(make(), bytes(32_000) if "order" in name else b""))
    held = 0.0

    async def watch() -> None:
        nonlocal held
        while True:
            began = time.perf_counter()
            await trio.sleep(0.001)
            held = max(held, time.perf_counter() - began)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        if isinstance(said, int):
            assert len((await ta.weights.inspect(path)).tensors) == said
        else:
            with pytest.raises(ta.weights.WeightsError, match=said):
                await ta.weights.inspect(path)
        nursery.cancel_scope.cancel()
    assert held < 0.5


@pytest.mark.parametrize("name", ["\\ud800", "a\\udfff", "\\ud800\\ud800"])
async def test_a_name_with_a_lone_surrogate_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "half.safetensors"
    for header in (
        b'{"%b":%b}' % (name.encode(), json.dumps(U8).encode()),
        b'{"__metadata__":{"%b":""}}' % name.encode(),
        b'{"__metadata__":{"x":"%b"}}' % name.encode(),
    ):
        path.write_bytes(raw(header, FOUR))
        with pytest.raises(ta.weights.WeightsError, match=r"half\.safetensors.*lone surrogate") as caught:
            await ta.weights.inspect(path)
        str(caught.value).encode()
    path.write_bytes(raw(b'{"\\ud83d\\ude00":%b}' % json.dumps(U8).encode(), FOUR))
    assert list((await ta.weights.inspect(path)).tensors) == ["\U0001f600"]


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"a": "x\0.safetensors"}},
        {"weight_map": {"a": "x\ud800.safetensors"}},
        {"weight_map": {"a\ud800": "x.safetensors"}},
        {"weight_map": []},
        {"weight_map": {"a": 3}},
        [],
    ],
)
async def test_an_error_of_an_index_names_it(tmp_path: Path, index: Any) -> None:
    path = tmp_path / "model.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(ta.weights.WeightsError, match=r"model\.index\.json"):
        await ta.weights.inspect(path)
