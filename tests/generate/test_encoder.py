"""`examples/generate/encoder.py`: embeddings of a model on disk, against float64 and under kills."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
import trio
from encoder import Encoder, open_encoder
from errors import ApiError
from minilm_float64 import embed_one
from text import InputError
from tiny_model import SHAPE, random_weights, write_model

import trio_accel as ta

pytestmark = pytest.mark.examples
pytest.importorskip("tokenizers", reason="pip install '.[generate]'")

TEXTS = ["The child was not a noise.", "the house", "money and money and the house of a child"]


async def opened(system: ta.System, device: ta.Device, folder: Path) -> Encoder:
    found = await open_encoder(system, device, write_model(folder), None)
    assert found is not None
    return found


async def test_embeddings_match_float64(system: ta.System, device: ta.Device, tmp_path: Path) -> None:
    encoder = await opened(system, device, tmp_path / "model")
    rows = encoder.tokens(TEXTS)
    assert rows[1] == [2, 4, 17, 3]
    assert encoder.tokens(rows) == rows
    wide = {name: array.astype(np.float64) for name, array in random_weights(SHAPE).items()}
    expected = [embed_one(wide, SHAPE, np.array(row)) for row in rows]
    answer = await encoder.answer(rows, "float")
    for number, (one, wanted) in enumerate(zip(answer["data"], expected, strict=True)):
        assert (one["index"], len(one["embedding"])) == (number, encoder.width)
        np.testing.assert_allclose(one["embedding"], wanted, rtol=0, atol=1e-5)
    coded = await encoder.answer(rows[:1], "base64")
    found = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(found, expected[0], rtol=0, atol=1e-5)
    assert answer["usage"] == {"prompt_tokens": sum(map(len, rows)), "total_tokens": sum(map(len, rows))}


async def test_texts_without_tokens_and_with_too_many(
    system: ta.System, device: ta.Device, tmp_path: Path
) -> None:
    encoder = await opened(system, device, tmp_path / "model")
    long = "child " * 254
    assert len(encoder.tokens(long)[0]) == 256
    for given, says in (
        ("", "input must have 1 to 256 tokens, got 0"),
        (["a", " \n"], r"input\[1\] must have 1 to 256 tokens, got 0"),
        (long + "child", "got 257"),
        ([[2, SHAPE.words]], f"from 0 to {SHAPE.words - 1}"),
        ([2, -1], "tokens from 0"),
    ):
        with pytest.raises(ApiError, match=says):
            encoder.tokens(given)


async def test_kills_change_no_embedding(system: ta.System, tmp_path: Path) -> None:
    """A kill may put texts into other batches, whose products round their rows differently."""
    options = ta.DeviceOptions(
        isolation="process",
        retry=1,
        retry_suspects=True,
        intensity=ta.Intensity(100, 60.0),
        backoff=ta.Backoff(initial=0.0, base=0.0, jitter=0.0),
    )
    async with system.open_device("cpu", options=options) as device:
        encoder = await opened(system, device, tmp_path / "model")
        rows = encoder.tokens(TEXTS) * 20
        calm = await encoder.answer(rows, "base64")
        fault = ta.testing.inject_fault(device, ta.graphs.Replay, kill=True, count=4)
        found = await encoder.answer(rows, "base64")
        assert fault.hit == 4
    assert [one["index"] for one in found["data"]] == list(range(len(rows)))
    assert found["usage"] == calm["usage"]
    embeddings = [
        np.stack([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answer["data"]])
        for answer in (found, calm)
    ]
    np.testing.assert_allclose(*embeddings, rtol=0, atol=1e-6)


async def test_a_folder_without_an_encoder(system: ta.System, device: ta.Device, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        await open_encoder(system, device, tmp_path, None)


async def test_a_tenant_with_many_texts_does_not_hold_up_another(
    system: ta.System, device: ta.Device, tmp_path: Path
) -> None:
    encoder = await opened(system, device, tmp_path / "model")
    rows, ended = encoder.tokens(TEXTS[1:2]), list[str]()

    async def ask(tenant: str, count: int) -> None:
        await encoder.answer(rows * count, "float", tenant)
        ended.append(tenant)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(ask, "many", 128)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(ask, "few", 1)
    assert ended.index("few") <= 1
