"""Optimizers, groups and averages against PyTorch's own, and Lion against its paper, over 50 steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from test_lost_ranks import disturb
from test_trainer import OPTIONS, WIDE, config, raises_inside
from train_models import CallMlp, NumpyMlp, batches, slopes, start

import trio_accel as ta
from trio_accel import train

pytestmark = pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning")

INLINE = ta.DeviceOptions(isolation="inline")
SHARD = train.Parallel(shard_optimizer=True)
Found = tuple[list[float], Mapping[str, Any], Mapping[str, Any]]


async def trained(
    module: Any, chosen: train.Config, steps: int, *, ranks: int = 2, options: Any = INLINE, each: Any = None
) -> Found:
    """Return the losses, the parameters and their averages."""
    losses: list[float] = []
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * ranks, options=options) as devices,
        train.open_trainer(devices, module, chosen) as trainer,
    ):
        async for step in trainer.steps(batches(16), until=steps):
            losses.append(step.loss)
            if each is not None:
                await each(trainer, step)
        averages = await trainer.parameters(averaged=True) if chosen.average is not None else {}
        return losses, await trainer.parameters(), averages


def by_torch(
    make: Callable[[dict[str, Any]], Any], steps: int, *, average: float | None = None, rates: Any = None
) -> Found:
    """Train by gradients of NumPy and an optimizer of PyTorch, on one processor."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    found = {name: torch.tensor(one) for name, one in start(np.random.default_rng(0), 16).items()}
    parameters = {name: torch.nn.Parameter(one) for name, one in found.items()}
    module, means = torch.nn.ParameterDict(parameters), None
    if average is not None:
        multi = torch.optim.swa_utils.get_ema_multi_avg_fn(average)
        means = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=multi)
    optimizer, losses = make(parameters), list[float]()
    for number, batch in zip(range(1, steps + 1), batches(16), strict=False):
        loss, g = slopes(on_host(parameters), batch["x"], batch["y"])
        losses.append(loss)
        for name, one in parameters.items():
            one.grad = torch.tensor(g[name]) if one.requires_grad else None
        for group, rate in zip(optimizer.param_groups, rates(number) if rates else (), strict=False):
            group["lr"] = rate
        optimizer.step()
        if means is not None:
            means.update_parameters(module)
    averages = {} if means is None else on_host(dict(means.module.items()))
    return losses, on_host(parameters), averages


def on_host(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one.detach().numpy().copy() for name, one in parameters.items()}


def assert_equal(found: Found, expected: Found, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=tolerance)
    for own, other in zip(found[1:], expected[1:], strict=True):
        for name in own:
            np.testing.assert_allclose(own[name], other[name], rtol=0, atol=tolerance, err_msg=name)


KINDS = ["calls", "torch"]


def module_of(kind: str) -> Any:
    if kind == "calls":
        return CallMlp
    return pytest.importorskip("torch_models", reason="PyTorch is not installed").TorchMlp


# Ours, the class of PyTorch, and its options.
OPTIMIZERS: dict[str, tuple[train.Optimizer, str, dict[str, Any]]] = {
    "adamw": (train.adamw(1e-2, weight_decay=0.1), "AdamW", {"lr": 1e-2, "weight_decay": 0.1}),
    "amsgrad": (train.adamw(1e-2, amsgrad=True), "AdamW", {"lr": 1e-2, "amsgrad": True}),
    "nadam": (train.nadam(1e-2, weight_decay=0.1), "NAdam", {"lr": 1e-2, "weight_decay": 0.1}),
    "nadamw": (
        train.nadam(1e-2, weight_decay=0.1, decoupled_weight_decay=True),
        "NAdam",
        {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "adafactor": (train.adafactor(0.1, weight_decay=0.1), "Adafactor", {"lr": 0.1, "weight_decay": 0.1}),
    "adafactor-eps": (
        train.adafactor(0.1, beta2_decay=-0.6, eps=(1e-6, 1e-2), d=1.5),
        "Adafactor",
        {"lr": 0.1, "beta2_decay": -0.6, "eps": (1e-6, 1e-2), "d": 1.5},
    ),
}


@pytest.fixture
def wide() -> Any:
    """PyTorch keeps numbers such as NAdam's product in its default dtype."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("wide")
async def test_fifty_steps_match_pytorch(name: str, kind: str) -> None:
    mine, theirs, options = OPTIMIZERS[name]
    torch = pytest.importorskip("torch")
    expected = by_torch(
        lambda parameters: getattr(torch.optim, theirs)([*parameters.values()], **options), 50, average=0.9
    )
    for parallel in (train.Parallel(), SHARD)[: 1 if mine.has_shapes else 2]:
        chosen = config(optimizer=mine, average=0.9, parallel=parallel)
        # An element with a gradient near 0 turns its rounding into a step.
        assert_equal(await trained(module_of(kind), chosen, 50), expected, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
async def test_lion_is_that_of_the_paper(kind: str) -> None:
    """Algorithm 2 of Chen et al., 2023."""
    parameters = start(np.random.default_rng(0), 16)
    mean = {name: np.zeros_like(one) for name, one in parameters.items()}
    losses = list[float]()
    for _, batch in zip(range(50), batches(16), strict=False):
        loss, slope = slopes(parameters, batch["x"], batch["y"])
        losses.append(loss)
        for name, g in slope.items():
            c = 0.8 * mean[name] + (1 - 0.8) * g
            parameters[name] = parameters[name] - 1e-3 * (np.sign(c) + 0.1 * parameters[name])
            mean[name] = 0.9 * mean[name] + (1 - 0.9) * g
    for parallel in (train.Parallel(), SHARD):
        optimizer = train.lion(1e-3, betas=(0.8, 0.9), weight_decay=0.1)
        found = await trained(module_of(kind), config(optimizer=optimizer, parallel=parallel), 50)
        assert_equal(found, (losses, parameters, {}))


CLASSES = ["RAdam", "Adagrad", "Adadelta", "Adamax", "RMSprop", "ASGD", "Rprop", "Adam", "SGD"]


@pytest.mark.parametrize("name", CLASSES)
async def test_any_class_of_pytorch(name: str) -> None:
    """Groups, and an average, by the class's own steps on real parameters."""
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    options: dict[str, Any] = {"Adagrad": {"initial_accumulator_value": 0.1}, "SGD": {"momentum": 0.9}}.get(
        name, {}
    )
    cls = getattr(torch.optim, name)

    def make(p: dict[str, Any]) -> Any:
        groups = [{"params": [p["w1"], p["w2"]]}, {"params": [p["b1"], p["b2"]], "lr": 1e-3}]
        return cls(groups, lr=1e-2, **options)

    mine = train.torch_optimizer(cls, 1e-2, **options)
    chosen = config(
        optimizer=mine, groups=[train.ParameterGroup(lambda one: one[0] == "b", lr=1e-3)], average=0.5
    )
    # PyTorch's numbers of each parameter are float32.
    assert_equal(await trained(module_of("torch"), chosen, 20), by_torch(make, 20, average=0.5), 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", [False, True])
async def test_groups_have_their_rates_and_decays(kind: str, shard: bool) -> None:
    """One group has a schedule, one a decay, and one is frozen."""
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    rate = train.warmup_cosine(2e-2, 4, 20)

    def make(p: dict[str, Any]) -> Any:
        p["b2"].requires_grad_(False)
        groups = [
            {"params": [p["w2"]]},
            {"params": [p["b1"]], "weight_decay": 0.0},
            {"params": [p["w1"]], "weight_decay": 0.3},
        ]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)

    expected = by_torch(make, 20, rates=lambda step: (1e-2, 1e-2, rate(step)))
    groups = [
        train.ParameterGroup(lambda name: name == "b1", weight_decay=0.0),
        train.ParameterGroup(lambda name: name == "b2", is_frozen=True),
        train.ParameterGroup(lambda name: name == "w1", lr=rate, weight_decay=0.3),
    ]
    chosen = config(groups=groups, parallel=train.Parallel(shard_optimizer=shard))
    found = await trained(module_of(kind), chosen, 20, ranks=3)
    assert {*found[1]} == {"w1", "b1", "w2"}
    assert_equal(found, expected)


@pytest.mark.parametrize("module", [CallMlp, NumpyMlp])
@pytest.mark.parametrize("optimizer", [train.adamw(1e-2), train.sgd(1e-2, momentum=0.9)])
async def test_averages_and_groups_are_the_same_under_kills(module: Any, optimizer: train.Optimizer) -> None:
    groups = [train.ParameterGroup(lambda name: name == "b1", lr=1e-3, weight_decay=0.0)]
    chosen = config(optimizer=optimizer, groups=groups, average=0.9, parallel=SHARD)
    quiet = await trained(CallMlp, chosen, 16, ranks=1)
    found = await trained(module, chosen, 16, options=OPTIONS, each=kill)
    assert_equal(found, quiet)


async def kill(trainer: train.Trainer, step: train.Step) -> None:
    if step.number != 13:  # a stopped worker needs `stuck_after`
        await disturb(trainer, step)
    if step.number == 15:
        assert trainer.workers_lost == 2


async def test_adafactor_under_kills() -> None:
    chosen = config(optimizer=train.adafactor(0.1), average=0.9)
    quiet = await trained(CallMlp, chosen, 16, ranks=1)
    assert_equal(await trained(CallMlp, chosen, 16, options=OPTIONS, each=kill), quiet)


GROUPS = [
    ([train.ParameterGroup(lambda name: "x" in name)], "groups: group 1 matches no parameter; there are"),
    (
        [train.ParameterGroup(lambda name: name == "w1"), train.ParameterGroup(lambda name: name[0] == "w")],
        "groups: parameter 'w1' belongs to groups 1 and 2",
    ),
    ([train.ParameterGroup(lambda name: True, is_frozen=True)], "every parameter of the model is frozen"),
]


@pytest.mark.parametrize(("groups", "says"), GROUPS)
async def test_refused_groups(groups: Any, says: str) -> None:
    with raises_inside(ValueError, says):
        await trained(CallMlp, config(groups=groups), 1)


RADAM = train.torch_optimizer("torch.optim:RAdam", 1e-2)


@pytest.mark.parametrize(
    ("kind", "changes", "error", "says"),
    [
        ("calls", {"optimizer": RADAM}, ta.NotSupportedError, "for a train.Module"),
        ("calls", {"optimizer": train.adafactor(), "parallel": SHARD}, ta.NotSupportedError, "on shapes"),
        ("calls", {"recompute": ["w1"]}, ta.NotSupportedError, "recompute is for a train.Module"),
        ("torch", {"optimizer": train.torch_optimizer("torch.optim:LBFGS", 1e-2)}, Exception, "LBFGS"),
        ("torch", {"optimizer": train.torch_optimizer("torch.optim:NoSuch", 1e-2)}, Exception, "NoSuch"),
        (
            "torch",
            {
                "optimizer": train.torch_optimizer("torch.optim:Rprop", 1e-2),
                "groups": [train.ParameterGroup(lambda name: name == "b1", weight_decay=0.1)],
            },
            Exception,
            "groups: torch.optim:Rprop does not take weight_decay",
        ),
    ],
)
async def test_refused_optimizers(kind: str, changes: dict[str, Any], error: Any, says: str) -> None:
    module = module_of(kind)
    with pytest.RaisesGroup(pytest.RaisesExc(error, match=says), flatten_subgroups=True):
        await trained(module, config(**changes), 1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: train.nadam(momentum_decay=-1.0), "nadam: momentum_decay must be a number from 0"),
        (lambda: train.nadam(betas=(0.9,)), "nadam: betas must be two numbers"),
        (lambda: train.lion(betas=(1.0, 0.9)), "lion: betas must be a number from 0 to below 1"),
        (lambda: train.adafactor(beta2_decay=0.8), "adafactor: beta2_decay must be a number of at most 0"),
        (lambda: train.adafactor(eps=1e-3), "adafactor: eps must be None or a number, and a number"),
        (lambda: train.adafactor(d=0.5), "adafactor: d must be at least 1, got 0.5"),
        (lambda: train.adamw(amsgrad=1), "adamw: amsgrad must be True or False, got 1"),
        (lambda: train.torch_optimizer("RAdam", 1e-3), "kind must be a class or 'module:Class', got 'RAdam'"),
        (
            lambda: train.ParameterGroup(lambda name: True, lr=-1.0),
            "ParameterGroup: lr must be a number from 0",
        ),
        (lambda: config(average=1.0), "average must be a number from 0 to below 1"),
        (lambda: config(precision=WIDE, groups=[3]), "groups must be"),
    ],
)
def test_numbers_of_optimizers(make: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        make()
