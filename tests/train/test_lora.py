"""Adapters, and recomputed layers, against a loop of PyTorch alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from test_lost_ranks import disturb
from test_trainer import config, raises_inside
from test_validation import held_out
from train_models import STOPPABLE, batches

import trio_accel as ta
from trio_accel import train

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
models: Any = pytest.importorskip("lora_models")
functional: Any = torch.nn.functional

INLINE = ta.DeviceOptions(isolation="inline")


async def trained(
    chosen: train.Config, until: int, *, ranks: int = 2, options: Any = INLINE, each: Any = None, **given: Any
) -> tuple[list[train.Step], dict[str, Any], train.Trainer]:
    steps: list[train.Step] = []
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * ranks, options=options) as devices,
        train.open_trainer(devices, models.Adapted, chosen, **given) as trainer,
    ):
        async for step in trainer.steps(batches(64), until=until):
            steps.append(step)
            if each is not None:
                await each(trainer, step)
        return steps, await trainer.parameters(), trainer


def tensors(batch: Mapping[str, Any]) -> tuple[Any, Any]:
    return torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])


def plain(steps: int) -> tuple[list[float], dict[str, Any], Any]:
    """Train adapters written out here, by PyTorch alone."""
    torch.manual_seed(0)
    model = models.adapted(lora=None)
    layers = [getattr(block, part) for part in ("up", "down") for block in model.blocks]
    a: list[Any] = []
    for layer in layers:
        first = torch.nn.Linear(layer.in_features, 2, bias=False, dtype=torch.float64)
        torch.nn.Linear(2, layer.out_features, bias=False, dtype=torch.float64)  # the same random numbers
        torch.nn.init.kaiming_uniform_(first.weight, a=5**0.5)
        a.append(first.weight.detach().requires_grad_())
    b = [torch.zeros(layer.out_features, 2, dtype=torch.float64, requires_grad=True) for layer in layers]

    def scores(x: Any) -> Any:
        ups = [layer.weight + 3.0 / 2 * (two @ one) for layer, one, two in zip(layers, a, b, strict=True)]
        x = functional.relu(model.first(x))
        for number, block in enumerate(model.blocks):
            inner = functional.gelu(functional.linear(x, ups[number], block.up.bias))
            x = x + functional.linear(inner, ups[2 + number], block.down.bias)
        return model.last(x)

    optimizer, losses = torch.optim.AdamW([*a, *b], 1e-2, weight_decay=0.1), list[float]()
    for _, batch in zip(range(steps), batches(64), strict=False):
        x, y = tensors(batch)
        optimizer.zero_grad()
        loss = functional.cross_entropy(scores(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    names = [f"blocks.{number}.{part}" for part in ("up", "down") for number in range(2)]
    found = {f"{name}.lora_A.weight": one.detach().numpy() for name, one in zip(names, a, strict=True)}
    found |= {f"{name}.lora_B.weight": one.detach().numpy() for name, one in zip(names, b, strict=True)}
    x, y = tensors({name: np.concatenate([one[name] for one in held_out()]) for name in ("x", "y")})
    with torch.no_grad():
        return losses, found, functional.cross_entropy(scores(x), y).item()


def assert_same(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    steps, parameters, _ = found
    losses, arrays, validation = expected
    np.testing.assert_allclose([step.loss for step in steps], losses, rtol=0, atol=tolerance)
    assert parameters.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_allclose(parameters[name], array, rtol=0, atol=tolerance, err_msg=name)
    assert steps[-1].metrics["loss"] == pytest.approx(validation, abs=tolerance)


@pytest.mark.parametrize("shard", [False, True])
async def test_adapters_match_a_plain_loop(shard: bool) -> None:
    parallel = train.Parallel(shard_optimizer=shard)
    chosen = config(validate=held_out(), validate_every=12, parallel=parallel)
    found = await trained(chosen, 12, ranks=2)
    assert_same(found, plain(12))
    # Only the adapter is replicated: two copies of it, and the optimizer's state.
    numbers = sum(array.size for array in found[1].values())
    assert numbers == 4 * 2 * (8 + 16)
    assert found[2].snapshot_bytes == (numbers + 2 * numbers / (2 if shard else 1)) * 8


async def test_adapters_under_faults_match_one_undisturbed_device(tmp_path: Path) -> None:
    """Averages, metrics and checkpoints too; only the adapter is saved, and continues with three ranks."""
    given: dict[str, Any] = {"validate": held_out(), "validate_every": 4, "average": 0.9}
    averages: list[dict[str, Any]] = []

    async def average(trainer: train.Trainer, step: train.Step) -> None:
        if step.number == 12:
            averages.append(await trainer.parameters(averaged=True))

    async def hurt(trainer: train.Trainer, step: train.Step) -> None:
        await average(trainer, step)
        await disturb(trainer, step)

    quiet = await trained(config(**given), 12, ranks=1, each=average)
    assert_same(quiet, plain(12))
    kept = train.Checkpoint(tmp_path, every=10, best="right", mode="max")
    found = await trained(config(**given, checkpoint=kept), 12, options=STOPPABLE, each=hurt)
    assert averages[0].keys() == averages[1].keys() == found[1].keys()
    for name, array in averages[0].items():
        np.testing.assert_allclose(averages[1][name], array, rtol=0, atol=1e-12, err_msg=name)
        assert np.abs(array - found[1][name]).max() > 1e-5
    assert found[2].workers_lost == 2
    assert_same(found, plain(12))
    for own, other in zip(found[0], quiet[0], strict=True):
        assert own.metrics == pytest.approx(other.metrics, abs=1e-12)
    whole = safetensors.numpy.load_file(tmp_path / "step-00000010" / "model-000.safetensors")
    assert whole.keys() == found[1].keys()


async def test_a_resumed_adapter(tmp_path: Path) -> None:
    kept = train.Checkpoint(tmp_path, every=5)
    first = await trained(config(checkpoint=kept), 5, ranks=2)
    second = await trained(config(checkpoint=kept, validate=held_out(), validate_every=12), 12, ranks=3)
    assert_same(([*first[0], *second[0]], *second[1:]), plain(12))
    # Other frozen parameters, by another seed.
    with raises_inside(train.CheckpointError, "another model: parameters that are not trained differ"):
        await trained(config(checkpoint=kept, seed=1), 13)


async def test_frozen_parameters_that_differ_from_worker_to_worker() -> None:
    async with (
        ta.open_system("training") as system,
        system.open_device("cpu", options=INLINE) as device,
        train.open_trainer([device], models.Unsteady, config()) as trainer,
    ):
        with pytest.raises(Exception, match=r"other numbers for 'first.bias' than before: parameters that"):
            await anext(trainer.steps(batches(64)))


async def test_recomputed_layers_have_the_same_gradients() -> None:
    """Dropout has the same random numbers in both passes."""
    quiet = await trained(config(), 6, ranks=1, drop=0.5)
    found = await trained(config(recompute=["blocks.*"]), 6, ranks=1, drop=0.5)
    assert [step.loss for step in found[0]] == [step.loss for step in quiet[0]]
    for name, array in quiet[1].items():
        np.testing.assert_array_equal(found[1][name], array)


def test_inner_results_are_not_kept() -> None:
    """The backward pass needs only the input of a block."""
    parts = import_module("trio_accel.train._torch_parts")

    def kept(patterns: list[str]) -> int:
        model, count = models.adapted(lora=None), list[int]()
        parts.recompute(model, patterns)

        def pack(tensor: Any) -> Any:
            count.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.zeros(32, 64, dtype=torch.float64)).sum()
        return sum(count)

    assert kept(["blocks.*"]) < kept(["blocks.0"]) < kept([])
    with pytest.raises(ValueError, match=r"recompute: 'block\.\*' matches no layer of the model"):
        kept(["block.*"])
    with pytest.raises(ValueError, match="matches no layer"):
        kept(["*.up"])


async def test_a_file_of_an_adapter(tmp_path: Path) -> None:
    _, parameters, trainer = await trained(config(), 3)
    path, lora = tmp_path / "adapter.safetensors", models.LORA
    lora.save(path, parameters, base=trainer.base)
    assert os.listdir(tmp_path) == ["adapter.safetensors"]
    found = safetensors.numpy.load_file(path)
    for name, array in parameters.items():
        np.testing.assert_array_equal(found[name], array)
        np.testing.assert_array_equal(lora.load(path)[name], array)
    # In PyTorch alone, and in the form of changes of the weights.
    torch.manual_seed(0)
    model = models.adapted()
    frozen = {name: one.numpy() for name, one in model.named_parameters() if not one.requires_grad}
    assert train.Lora.base_of(frozen) == trainer.base
    lora.put(model, path)
    merged = models.adapted(lora=None)
    merged.load_state_dict({name: model.state_dict()[name] for name in merged.state_dict()})
    with torch.no_grad():
        for name, change in lora.changes(lora.load(path)).items():
            merged.get_parameter(name).add_(torch.from_numpy(change))
        x = tensors(next(batches(64)))[0]
        np.testing.assert_allclose(model(x).numpy(), merged(x).numpy(), atol=1e-12)
    # A training that begins with it has its loss.
    [step] = (await trained(config(), 1, adapter=str(path)))[0]
    with torch.no_grad():
        loss = functional.cross_entropy(merged(x), tensors(next(batches(64)))[1])
    assert step.loss == pytest.approx(loss.item(), abs=1e-12)


def test_a_full_disk_keeps_the_previous_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lora = tmp_path / "adapter.safetensors", train.Lora(["up"], rank=1)
    named = {"up.lora_A.weight": np.ones((1, 3)), "up.lora_B.weight": np.ones((2, 1))}
    lora.save(path, named)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        lora.save(path, {name: 2 * array for name, array in named.items()})
    assert os.listdir(tmp_path) == ["adapter.safetensors"]
    np.testing.assert_array_equal(lora.load(path)["up.lora_A.weight"], named["up.lora_A.weight"])


async def test_refused_adapters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, lora, path = models.adapted(), models.LORA, tmp_path / "adapter.safetensors"
    named = {name: one.detach().numpy() for name, one in model.named_parameters() if one.requires_grad}
    lora.save(path, named, base=7)
    for other, says in (
        (train.Lora(lora.targets, rank=3, alpha=3.0), "has the rank 2, and 3 is wanted"),
        (train.Lora(lora.targets, rank=2, alpha=4.0), "has the alpha 3.0, and 4.0 is wanted"),
    ):
        with pytest.raises(train.AdapterError, match=says):
            other.load(path)
    with pytest.raises(train.AdapterError, match="of another model: the parameters that it adapts differ"):
        lora.put(model, path)
    lora.save(path, named)
    with pytest.raises(train.AdapterError, match=r"another model: 'blocks.0.up.lora_A.weight' has the shape"):
        lora.put(models.adapted(width=4), path)
    lora.save(path, {name: one for name, one in named.items() if "1.down" not in name})
    with pytest.raises(train.AdapterError, match=r"another model: 'blocks.1.down.lora_A.weight' is missing"):
        lora.put(model, path)
    for bad, says in (
        ({"first.weight": np.zeros((2, 2))}, "'first.weight' of shape"),
        ({"x.lora_A.weight": np.zeros((2, 2))}, "is not part of an adapter of rank 2"),
        ({"x.lora_A.weight": np.zeros((3, 2)), "x.lora_B.weight": np.zeros((2, 3))}, "adapter of rank 2"),
        ({}, "the file contains no arrays"),
    ):
        with pytest.raises(train.AdapterError, match=says):
            lora.save(path, bad)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(train.AdapterError, match=r"adapter\.safetensors cannot be read"):
        lora.load(path)
    safetensors.numpy.save_file({"x": np.zeros(3)}, path)
    with pytest.raises(train.AdapterError, match="has the rank None, and 2 is wanted"):
        lora.load(path)
    with pytest.raises(FileNotFoundError):
        lora.load(tmp_path / "none")
    with raises_inside(train.AdapterError, "has the rank None"):
        await trained(config(), 1, adapter=str(path))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: train.Lora("up"), "targets must be names of layers"),
        (lambda: train.Lora([]), "targets must be names of layers"),
        (lambda: train.Lora(["up"], rank=0), "rank must be an integer of at least 1"),
        (lambda: train.Lora(["up"], alpha=float("nan")), "alpha must be a number"),
        (lambda: models.adapted(lora=train.Lora(["up"])), "'up' matches no layer of the model"),
        (lambda: models.adapted(lora=train.Lora(["blocks.0"])), "'blocks.0' must be a Linear layer without"),
        (
            lambda: models.LORA.add(models.adapted()),
            "'blocks.0.up' must be a Linear layer without an adapter",
        ),
    ],
)
def test_adapters_that_cannot_be(make: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        make()
