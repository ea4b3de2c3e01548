"""The state dict of PyTorch models: loaded by PyTorch, and compared with its own training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_lost_ranks import disturb
from test_trainer import WIDE, config, raises_inside
from train_models import STOPPABLE, batches

import trio_accel as ta
from trio_accel import train

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
models: Any = pytest.importorskip("torch_models")
lora_models: Any = pytest.importorskip("lora_models")
functional: Any = torch.nn.functional

INLINE = ta.DeviceOptions(isolation="inline")
HELD_OUT = next(batches(200, seed=9))


async def exported(
    chosen: train.Config,
    module: Any = models.Layered,
    *,
    steps: int = 6,
    ranks: int = 1,
    options: ta.DeviceOptions = INLINE,
    each: Any = None,
    averaged: bool = False,
) -> tuple[dict[str, Any], float]:
    """Train, and return the state dict, and the loss of the validation."""
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * ranks, options=options) as devices,
        train.open_trainer(devices, module, chosen) as trainer,
    ):
        async for step in trainer.steps(batches(64), until=steps):
            if each is not None:
                await each(trainer, step)
        arrays = await trainer.state_dict(averaged=averaged)
        return arrays, (await trainer.validate([HELD_OUT], averaged=averaged))["loss"]


def loaded(arrays: Mapping[str, Any], model: Any) -> Any:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    assert list(tensors) == list(model.state_dict())
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def layers(compute: str) -> Any:
    """Return a new network that computes in a dtype."""
    model = models.Layers()
    for layer in model.children():
        layer.to(getattr(torch, compute))
    return model


def loss_of(model: Any) -> float:
    parameter = next(model.parameters())
    x, y = torch.from_numpy(HELD_OUT["x"]), torch.from_numpy(HELD_OUT["y"])
    with torch.no_grad():
        return float(functional.cross_entropy(model(x.to(parameter.dtype)).double(), y))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("compute", ["float64", "float32", "bfloat16", "float16"])
async def test_a_loaded_model_answers_as_the_validation(compute: str, ranks: int) -> None:
    precision = train.Precision(compute, master="float64" if compute == "float64" else "float32")
    arrays, loss = await exported(config(precision=precision), ranks=ranks)
    model = loaded(arrays, layers(compute))
    tolerance = {"float64": 1e-12, "float32": 1e-5}.get(compute, 0.02)
    assert abs(loss_of(model) - loss) < tolerance
    # The frozen bias was made with the seed of the configuration.
    torch.manual_seed(0)
    np.testing.assert_array_equal(arrays["first.bias"], models.Layers().first.bias.numpy())
    assert arrays["turned"].dtype == np.complex64
    assert arrays["turned"].tolist() == [-1 - 2j, -3 + 4j]  # after six factors of the imaginary unit
    assert arrays["mask"].tolist() == arrays["same"].tolist() == [True, False]
    assert arrays["steps"].dtype == arrays["norm1d.num_batches_tracked"].dtype == np.int64
    assert (int(arrays["steps"]), int(arrays["norm2d.num_batches_tracked"])) == (2**40 + 7, 6)
    # A layer without parameters keeps its table in the wider dtype.
    np.testing.assert_array_equal(arrays["table"], torch.linspace(0, 1, 5).numpy())
    assert "scratch" not in arrays


async def test_buffers_match_a_training_by_pytorch() -> None:
    torch.manual_seed(0)
    model = layers("float64")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, weight_decay=0.1)
    for _, batch in zip(range(6), batches(64), strict=False):
        optimizer.zero_grad()
        functional.cross_entropy(model(torch.from_numpy(batch["x"])), torch.from_numpy(batch["y"])).backward()
        optimizer.step()
    arrays, _ = await exported(config())
    for name, tensor in model.state_dict().items():
        # Adam makes steps of the rounded gradient of a bias before a norm, which is 0.
        if name != "conv.bias":
            np.testing.assert_allclose(arrays[name], tensor.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


async def test_an_export_after_losses_and_from_a_checkpoint(tmp_path: Path) -> None:
    quiet, _ = await exported(config(), ranks=2, steps=8)
    checkpoint = train.Checkpoint(tmp_path, every=8)
    chosen = config(checkpoint=checkpoint)
    found, _ = await exported(chosen, ranks=2, steps=8, options=STOPPABLE, each=disturb)
    resumed, _ = await exported(chosen, ranks=1, steps=8)
    for arrays in (found, resumed):
        assert arrays.keys() == quiet.keys()
        for name, array in quiet.items():
            np.testing.assert_array_equal(arrays[name], array, err_msg=name)
            assert arrays[name].dtype == array.dtype


async def test_averages_and_frozen_groups() -> None:
    groups = [train.ParameterGroup(lambda name: name.startswith("conv."), is_frozen=True)]
    chosen = config(average=0.5, groups=groups, parallel=train.Parallel(shard_optimizer=True))
    arrays, loss = await exported(chosen, ranks=2, averaged=True)
    assert abs(loss_of(loaded(arrays, layers("float64"))) - loss) < 1e-12
    current, _ = await exported(chosen, ranks=2)
    assert not np.array_equal(current["last.weight"], arrays["last.weight"])
    for name in ("conv.weight", "first.bias", "norm1d.running_var"):
        np.testing.assert_array_equal(current[name], arrays[name])


async def test_adapters() -> None:
    arrays, loss = await exported(config(), lora_models.Adapted)
    assert abs(loss_of(loaded(arrays, lora_models.adapted())) - loss) < 1e-12


async def test_master_parameters_in_bfloat16() -> None:
    whole = train.Precision("bfloat16", master="bfloat16")
    arrays, _ = await exported(config(precision=whole))
    assert {array.dtype.name for array in arrays.values()} == {"float32", "int64", "bool", "complex64"}
    loaded(arrays, models.Layers())


async def test_a_state_next_to_parameters_and_buffers() -> None:
    with raises_inside(ta.NotSupportedError, "state_dict: the training does not keep '_extra_state'"):
        await exported(config(), models.WithExtraState)


async def test_stages_with_equal_names() -> None:
    chosen = config(precision=WIDE, parallel=train.Parallel(pipeline=2), accumulate=2)
    arrays, _ = await exported(chosen, models.SharedMlp, ranks=2)
    assert sorted(arrays) == ["b1", "b2", "w1", "w2"]
    with raises_inside(ValueError, "stages 0 and 1 both have 'w': name the layers of each stage differently"):
        await exported(chosen, models.SameNames, ranks=2)
