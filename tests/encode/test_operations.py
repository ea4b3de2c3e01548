"""`examples/encode`: the encoder by operations of the package against float64, and served under faults."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import encode_operations
import minilm_operations
import numpy as np
import pytest
import trio
from chosen import BACKEND, INLINE
from command import Cli, make_cli
from encode_operations import Served
from hypothesis import given, settings
from hypothesis import strategies as st
from minilm import Shape
from minilm_float64 import embed_one
from minilm_operations import OperationsEncoder, attention, fused_attention, load_encoder
from tiny_model import SHAPE, random_weights, write_model, write_weights

import trio_accel as ta

pytestmark = pytest.mark.examples

# Of embeddings, which have length 1; the weights are also rounded.
TOLERANCES = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-1}


def embeddings(weights: dict[str, Any], shape: Shape, sentences: list[Any]) -> Any:
    wide = {name: array.astype(np.float64) for name, array in weights.items()}
    return np.stack([embed_one(wide, shape, np.array(sentence)) for sentence in sentences])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_weights(path, random_weights(SHAPE))
    return path


SENTENCES = [np.arange(count) % SHAPE.words for count in (3, 1, 17, 40, 9)]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("way", [attention, fused_attention])
async def test_embeddings_match_float64(
    device: ta.Device, path: Path, dtype: str, way: minilm_operations.Attention
) -> None:
    encoder = await load_encoder(device, path, SHAPE, dtype=dtype, attention=way)
    try:
        found = await encoder.embed(SENTENCES)
    except ta.NotSupportedError:
        if BACKEND == "cpu" or way is attention:
            raise
        pytest.skip(f"{BACKEND} has no attention of {dtype}")
    assert found.dtype == np.float32
    expected = embeddings(random_weights(SHAPE), SHAPE, SENTENCES)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCES[dtype])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.builds(
        Shape,
        layers=st.integers(1, 3),
        heads=st.sampled_from([1, 2]),
        width=st.sampled_from([4, 16]),
        inner=st.integers(1, 20),
        words=st.just(11),
        places=st.just(9),
        types=st.integers(1, 2),
        epsilon=st.sampled_from([1e-12, 1e-5]),
    ),
    st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=9), min_size=1, max_size=4),
    st.integers(0, 1000),
)
def test_any_shape_and_sentences(shape: Shape, sentences: list[list[int]], seed: int) -> None:
    weights = random_weights(shape, seed)

    async def main() -> None:
        async with ta.open_system("any") as system, system.open_device(BACKEND, options=INLINE) as device:
            encoder = await load_encoder(device, path, shape, batch=4)
            found = await encoder.embed([np.array(sentence) for sentence in sentences])
            np.testing.assert_allclose(found, embeddings(weights, shape, sentences), rtol=0, atol=2e-5)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write_weights(path, weights)
        trio.run(main)


async def test_a_graph_has_the_numbers_of_its_operations(device: ta.Device, path: Path) -> None:
    encoder = await load_encoder(device, path, SHAPE, batch=2)
    tokens = np.array([[1, 2, 3, -1], [4, -1, -1, -1]])
    one_by_one = await (await encoder.forward(await device.put(tokens))).to_host()
    graph = await encoder.graph(4)
    assert graph is await encoder.graph(4)
    np.testing.assert_array_equal(await (await graph(tokens)).to_host(), one_by_one)


async def test_sentences_that_cannot_be_encoded(device: ta.Device, path: Path) -> None:
    encoder: OperationsEncoder = await load_encoder(device, path, SHAPE)
    assert [encoder.check(np.zeros(count, int)) for count in (1, 16, 17, 256, 257)] == [16, 16, 32, 256, 300]
    for sentence, said in (
        ([], "1 to 300 tokens, got 0"),
        ([0] * 301, "1 to 300 tokens, got 301"),
        ([0, SHAPE.words], "0 to 17, got 0 to 18"),
        ([-1, 3], "0 to 17, got -1 to 3"),
    ):
        with pytest.raises(ValueError, match=said):
            await encoder.embed([np.array(sentence)])


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    if sys.platform != "linux":
        pytest.skip("there are worker processes on Linux only")
    return make_cli(encode_operations.run, capsys)


QUICK = ("--backend", BACKEND, "--faults", "1", "--every", "0.05", "--clients", "5")
OUTPUT = """\
24 sentences on (?:cpu|cuda):0: 1 layers, 64 numbers
1 contexts lost, ([0-9]+) of \\1 requests answered, again after [0-9]+ ms; [0-9]+ embeddings .*
right: difference from NumPy in float64 [0-9.e-]+, allowed 1e-05
right: requests lost 0, allowed 0
right: faults not felt 0, allowed 0
right: difference from the embeddings before the faults [0-9.e-]+, allowed 1e-06
"""


def test_no_request_is_lost_under_faults(cli: Cli) -> None:
    done = cli("--random", 1, *QUICK)
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(OUTPUT, done.out), done.out


def test_a_model_is_served(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "text.txt").write_text("The child was not a noise. He and she!\n")
    done = cli("--model", write_model(tmp_path), "--text", tmp_path / "text.txt", *QUICK)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("2 sentences on ")


def test_requests_that_fail_are_counted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    # A batch to blame for a loss would be divided by the batcher, and asked again.
    inject = ta.testing.inject_fault
    monkeypatch.setattr(ta.testing, "inject_fault", lambda *given, poison: inject(*given, kill=poison))
    monkeypatch.setattr(encode_operations, "OPTIONS", attrs.evolve(encode_operations.OPTIONS, retry=0))
    done = cli("--random", 1, *QUICK)
    assert done.code == 1
    assert re.search(r"^WRONG: requests lost [1-9]", done.out, re.MULTILINE), done.out
    assert re.search(r" requests answered, [1-9][0-9]* ContextLostError, again after", done.out), done.out


def test_violations_are_reported() -> None:
    good = Served(
        requests=9, answered=9, errors={}, change=1e-7, same=8, seconds=1.0, losses=2, recoveries=[0.1, 0.3]
    )
    assert all(check.is_ok for check in good.checks())
    assert str(good).startswith("2 contexts lost, 9 of 9 requests answered, again after 200 ms")
    for change in ({"answered": 8}, {"change": 1e-5}, {"change": float("nan")}, {"losses": 1}):
        assert sum(not check.is_ok for check in attrs.evolve(good, **change).checks()) == 1


def test_a_missing_model(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    done = cli("--model", tmp_path / "missing")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("encode_operations: cannot read ")


def test_a_missing_device(cli: Cli) -> None:
    done = cli("--random", 1, "--backend", "bogus")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("encode_operations: cannot open a device: ")


def test_options_that_cannot_be_used(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli("--random", 1, "--clients", "0")
    assert "is out of range" in capsys.readouterr().err
