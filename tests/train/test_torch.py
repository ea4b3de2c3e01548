"""Modules of PyTorch: against the formulas, and against PyTorch's own training on one processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from test_lost_ranks import disturb
from test_trainer import assert_same, config, raises_inside, trained
from train_models import STOPPABLE, batches, reference

from trio_accel import train

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
models: Any = pytest.importorskip("torch_models")
functional: Any = torch.nn.functional


@pytest.mark.parametrize("ranks", [1, 2, 4])
async def test_losses_match_the_formulas_under_faults(ranks: int) -> None:
    chosen = config(clip_norm=0.5, accumulate=2, parallel=train.Parallel(shard_optimizer=ranks == 4))
    found = await trained(ranks, models.TorchMlp, chosen, 16, options=STOPPABLE, each=disturb)
    assert_same(found, reference(16, 64, clip=0.5))
    assert found[2][-1].workers_lost == 3


@pytest.mark.parametrize(("pipeline", "tensor"), [(2, 1), (1, 2), (2, 2)])
async def test_stages_and_shared_layers(pipeline: int, tensor: int) -> None:
    chosen = config(parallel=train.Parallel(pipeline=pipeline, tensor=tensor), accumulate=4, clip_norm=0.5)
    found = await trained(pipeline * tensor, models.SharedMlp, chosen, 8)
    losses, expected = reference(8, 64, clip=0.5)
    np.testing.assert_allclose(found[0], losses, rtol=0, atol=1e-12)
    for name, axis in (("w1", 0), ("b1", 0), ("w2", 1)):
        parts = found[1][name] if tensor > 1 else [found[1][name]]
        whole = np.concatenate(parts, axis=axis)
        np.testing.assert_allclose(whole.T, expected[name], rtol=0, atol=1e-12, err_msg=name)


async def test_momentum() -> None:
    found = await trained(2, models.TorchMlp, config(optimizer=train.sgd(5e-2, momentum=0.9)), 10)
    assert_same(found, reference(10, 64, lr=train.constant(5e-2), decay=0.0, momentum=0.9))


async def test_buffers_are_part_of_the_state() -> None:
    """One rank: PyTorch's own training, with its own optimizer."""
    model = models.Normed.configure(object.__new__(models.Normed))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    expected: list[float] = []
    for _, batch in zip(range(8), batches(64), strict=False):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(torch.from_numpy(batch["x"])), torch.from_numpy(batch["y"]))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    found = await trained(1, models.Normed, config(), 8, options=STOPPABLE, each=disturb)
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-12)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(found[1][name], parameter.detach().numpy(), rtol=0, atol=1e-12)


async def test_random_numbers_are_the_same_when_a_step_is_done_again() -> None:
    quiet = await trained(2, models.Dropped, config(), 16)
    found = await trained(2, models.Dropped, config(), 16, options=STOPPABLE, each=disturb)
    assert found[0] == quiet[0]
    assert len({*np.round(quiet[0], 3)}) > 8
    other = await trained(2, models.Dropped, config(seed=1), 4)
    assert other[0][1:] != quiet[0][1:4]


async def test_half_precision_keeps_the_parameters_wide() -> None:
    narrow = train.Precision(compute="bfloat16", reduce="float32")
    found = await trained(2, models.TorchMlp, config(precision=narrow), 12)
    losses, parameters = reference(12, 64)
    np.testing.assert_allclose(found[0], losses, rtol=0, atol=0.02)
    for name, array in parameters.items():
        assert found[1][name].dtype == np.float32
        assert np.abs(found[1][name] - array).mean() < 0.005, name


async def test_all_in_bfloat16(tmp_path: Path) -> None:
    """Parameters, gradients and the optimizer's state: equal to PyTorch's own training, bit by bit."""
    whole = train.Precision("bfloat16", master="bfloat16")
    model = models.TorchMlp.configure(object.__new__(models.TorchMlp), dtype="bfloat16")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1, fused=True)
    expected, norms = list[float](), list[float]()
    for _, batch in zip(range(8), batches(64), strict=False):
        optimizer.zero_grad()
        hidden = functional.relu(torch.from_numpy(batch["x"]).bfloat16() @ model["w1"] + model["b1"])
        scores = hidden @ model["w2"] + model["b2"]
        loss = functional.cross_entropy(scores, torch.from_numpy(batch["y"]))
        loss.backward()
        norms.append(sum(float(one.grad.double().square().sum()) for one in model.parameters()) ** 0.5)
        optimizer.step()
        expected.append(loss.item())
    checkpoint = train.Checkpoint(tmp_path, every=4)
    first = await trained(1, models.TorchMlp, config(precision=whole, checkpoint=checkpoint), 4)
    resumed = attrs.evolve(checkpoint, load="latest")
    found = await trained(1, models.TorchMlp, config(precision=whole, checkpoint=resumed), 8)
    np.testing.assert_array_equal([*first[0], *found[0]], expected)
    np.testing.assert_allclose([one.gradient_norm for one in (*first[2], *found[2])], norms, rtol=1e-3)
    for name, parameter in model.named_parameters():
        assert found[1][name].dtype.name == "bfloat16"
        np.testing.assert_array_equal(found[1][name].astype(np.float32), parameter.detach().float().numpy())


async def test_scaled_losses_that_overflow_are_skipped() -> None:
    """The loss is halved until its gradients fit; then it continues, and nothing was changed before."""
    precision = train.Precision(compute="float16", scale=2.0**20, growth=10_000)
    found = await trained(2, models.Overflowing, config(precision=precision), 4)
    skipped = [step for step in found[2] if step.is_skipped]
    assert skipped
    assert found[2][: len(skipped)] == skipped
    assert {step.number for step in skipped} == {0}
    assert [step.number for step in found[2][len(skipped) :]] == [1, 2, 3, 4]
    # Each batch was seen once, also where its step was skipped.
    losses = reference(len(found[2]), 64)[0]
    np.testing.assert_allclose(found[0][: len(skipped) + 1], 128 * losses[0], rtol=0.15)


async def test_ranks_with_different_modules() -> None:
    with raises_inside(ValueError, r"configure\(\) has made another model than before: 'b1' has the shape"):
        await trained(2, models.Other, config(), 1)
