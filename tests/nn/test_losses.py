"""Losses against their formulas in float64, and their gradients against differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
from array_numbers import numbers
from chosen import BACKEND
from differences import gradient, widest
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import nn

TOLERANCES = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6, "float64": 1e-12}
REDUCTIONS = ("none", "mean", "sum")


def sigmoids(x: Any, target: Any, weight: Any = 1, pos_weight: Any = 1) -> Any:
    kept, other = scipy.special.log_expit(x), scipy.special.log_expit(-x)
    return -weight * (pos_weight * target * kept + (1 - target) * other)


def smooth(x: Any, target: Any, beta: float = 1.0) -> Any:
    d = np.abs(x - target)
    return np.where(d < beta, 0.5 * d * d / max(beta, 1e-300), d - 0.5 * beta)


def huber(x: Any, target: Any, delta: float = 1.0) -> Any:
    d = np.abs(x - target)
    return np.where(d <= delta, 0.5 * d * d, delta * (d - 0.5 * delta))


def divergence(x: Any, target: Any, log_target: bool = False) -> Any:
    if log_target:
        return np.exp(target) * (target - x)
    return scipy.special.xlogy(target, target) - target * x


WANTED: dict[str, Callable[..., Any]] = {
    "mse_loss": lambda x, target: (x - target) ** 2,
    "l1_loss": lambda x, target: np.abs(x - target),
    "smooth_l1_loss": smooth,
    "huber_loss": huber,
    "binary_cross_entropy_with_logits": sigmoids,
    "kl_div": divergence,
}
WEIGHT = np.array([0.5, 2.0, 1.0, 0.25, 3.0])
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in WANTED),
    ("smooth_l1_loss", {"beta": 0.3}),
    ("huber_loss", {"delta": 0.3}),
    ("binary_cross_entropy_with_logits", {"weight": WEIGHT, "pos_weight": 2.5}),
    ("kl_div", {"log_target": True}),
]
each_loss = pytest.mark.parametrize(("function", "options"), OPTIONS)


def reduce(x: Any, reduction: str) -> Any:
    return x if reduction == "none" else getattr(np, reduction)(x)


def pair(name: str = "float64", shape: tuple[int, ...] = (7, 5)) -> tuple[Any, Any]:
    x = numbers(shape, name)
    return x, scipy.special.expit(widest(numbers(shape, name, 5))).astype(x.dtype)


def assert_near(got: Any, want: Any, name: str) -> None:
    assert np.shape(got) == np.shape(want)
    np.testing.assert_allclose(widest(got), want, rtol=TOLERANCES[name], atol=TOLERANCES[name] / 10)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@each_loss
async def test_losses(device: ta.Device, function: str, options: dict[str, Any], name: str) -> None:
    x, target = pair(name)
    given = {key: one.astype(x.dtype) if isinstance(one, np.ndarray) else one for key, one in options.items()}
    each = WANTED[function](widest(x), widest(target), **options)
    on, wanted = await device.put(x), await device.put(target)
    for reduction in REDUCTIONS:
        found = await getattr(nn, function)(on, wanted, reduction=reduction, **given)
        assert found.dtype == name
        assert_near(await found.to_host(), reduce(each, reduction), name)


@each_loss
async def test_gradients(device: ta.Device, function: str, options: dict[str, Any]) -> None:
    x, target = pair()
    call = getattr(nn, f"{function}_grad")
    for reduction in REDUCTIONS:
        grad = numbers(x.shape, "float64", 7) if reduction == "none" else 1.5
        want = gradient(
            lambda moved, r=reduction: reduce(WANTED[function](moved, target, **options), r), x, grad
        )
        found = await call(grad, await device.put(x), target, reduction=reduction, **options)
        np.testing.assert_allclose(await found.to_host(), want, rtol=1e-6, atol=1e-8)
    array = await call(await device.put(np.array(1.5)), x, target, reduction="sum", **options)
    np.testing.assert_allclose(await array.to_host(), await found.to_host(), rtol=1e-13)
    half = await call(1.5, await device.put(x.astype("f2")), target.astype("f2"), **options)
    assert half.dtype == ("float64" if function.startswith("binary") and "weight" in options else "float16")


async def test_large_logits(device: ta.Device) -> None:
    x, target = np.array([-1e30, -200, -30, 30, 200, 1e30], "f4"), np.array([0, 0, 0, 1, 1, 1], "f4")
    on = await device.put(x)
    found = await nn.binary_cross_entropy_with_logits(on, target, reduction="none")
    with np.errstate(under="ignore"):
        want = sigmoids(widest(x), widest(target)).astype("f4")
    np.testing.assert_allclose(await found.to_host(), want, rtol=1e-6)
    wrong = await nn.binary_cross_entropy_with_logits(on, 1 - target, reduction="none")
    np.testing.assert_allclose(await wrong.to_host(), np.abs(x), rtol=1e-6)
    zeros = await nn.kl_div(
        await device.put(np.array([-np.inf, -1.0])), np.array([0.0, 1.0]), reduction="sum"
    )
    assert await zeros.item() == 1


async def test_divergence_of_a_batch(device: ta.Device) -> None:
    x, target = pair()
    on = await device.put(x)
    found = await nn.kl_div(on, target, reduction="batchmean")
    np.testing.assert_allclose(await found.item(), divergence(x, target).sum() / 7, rtol=1e-12)
    slopes = await nn.kl_div_grad(2, on, target, reduction="batchmean")
    np.testing.assert_allclose(await slopes.to_host(), -target * 2 / 7, rtol=1e-12)


# Of cross entropies: by NumPy, in float64.
def entropy(
    logits: Any,
    labels: Any,
    weight: Any = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    axis = min(1, logits.ndim - 1)
    logs = np.moveaxis(scipy.special.log_softmax(logits, axis), axis, -1)
    classes = logs.shape[-1]
    weight = np.ones(classes) if weight is None else weight
    counted = labels != ignore_index
    hot = np.eye(classes)[np.where(counted, labels, 0)] * weight
    each = -(((1 - label_smoothing) * hot + label_smoothing / classes * weight) * logs).sum(-1) * counted
    if reduction == "none":
        return each
    return each.sum() / ((hot.sum(-1) * counted).sum() if reduction == "mean" else 1)


CASES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((6, 5), {}),
    ((5,), {}),
    ((5,), {"label_smoothing": 0.1, "weight": WEIGHT}),
    ((6, 5), {"weight": WEIGHT}),
    ((6, 5), {"label_smoothing": 0.2}),
    ((6, 5), {"ignore_index": 2}),
    ((4, 5, 3), {"weight": WEIGHT, "ignore_index": -1}),
    ((4, 5, 3, 2), {"label_smoothing": 0.3, "weight": WEIGHT, "ignore_index": 0}),
]
each_case = pytest.mark.parametrize(("shape", "options"), CASES)


def labelled(shape: tuple[int, ...], ignore_index: int = -100, dtype: str = "int64") -> tuple[Any, Any]:
    logits = numbers(shape, "float64") * 3
    labels = np.random.default_rng(4).integers(0, 5, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
    if labels.ndim and ignore_index < 0:
        labels.ravel()[::4] = ignore_index
    return logits, labels.astype(dtype)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@each_case
async def test_cross_entropy(
    device: ta.Device, name: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    logits, labels = labelled(shape, options.get("ignore_index", -100))
    logits = logits.astype(ta.DType(name).dtype)
    on = await device.put(logits)
    for reduction in REDUCTIONS:
        found = await nn.cross_entropy(on, await device.put(labels), reduction=reduction, **options)
        assert found.dtype == name
        assert_near(
            await found.to_host(), entropy(widest(logits), labels, reduction=reduction, **options), name
        )


@each_case
async def test_gradient_of_cross_entropy(
    device: ta.Device, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    logits, labels = labelled(shape, options.get("ignore_index", -100))
    on = await device.put(logits)
    for reduction in REDUCTIONS:
        grad = numbers(labels.shape, "float64", 9) if reduction == "none" else 1.5
        want = gradient(lambda x, r=reduction: entropy(x, labels, reduction=r, **options), logits, grad)
        found = await nn.cross_entropy_grad(grad, on, labels, reduction=reduction, **options)
        assert found.shape == shape
        np.testing.assert_allclose(await found.to_host(), want, rtol=1e-6, atol=1e-8)
    for name in ("float16", "float32"):
        narrow = logits.astype(name)
        low = await nn.cross_entropy_grad(1.5, await device.put(narrow), labels, **options)
        high = await nn.cross_entropy_grad(1.5, await device.put(widest(narrow)), labels, **options)
        assert low.dtype == name
        assert_near(await low.to_host(), await high.to_host(), name)


async def test_nll_loss(device: ta.Device) -> None:
    for shape, options in CASES:
        if "label_smoothing" in options:
            continue
        logits, labels = labelled(shape, options.get("ignore_index", -100), "int16")
        logs = scipy.special.log_softmax(logits, min(1, len(shape) - 1))
        for reduction in REDUCTIONS:
            found = await nn.nll_loss(await device.put(logs), labels, reduction=reduction, **options)
            want = entropy(logits, labels, reduction=reduction, **options)
            np.testing.assert_allclose(await found.to_host(), want, rtol=1e-12, atol=1e-14)


async def test_confident_logits_lose_no_digits(device: ta.Device) -> None:
    logits = np.array([[20.0, 0, -3], [1000, 0, -1000], [-1e30, 0, 1e30]], "f4")
    on, labels = await device.put(logits), np.array([0, 0, 2], np.uint8)
    found = await nn.cross_entropy(on, labels, reduction="none")
    with np.errstate(under="ignore"):
        want = entropy(widest(logits), labels, reduction="none")
    np.testing.assert_allclose(await found.to_host(), want, rtol=1e-6, atol=1e-30)
    slope = await nn.cross_entropy_grad(1, on, labels, reduction="sum")
    np.testing.assert_allclose((await slope.to_host())[0, 0], -want[0], rtol=1e-6)


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_labels_are_checked(device: ta.Device) -> None:
    logits, weight = await device.put(numbers((4, 5), "float32")), await device.put(WEIGHT)
    right = np.array([0, 4, 1, 1])
    for wrong in (5, -1, -6, 1 << 40, -(1 << 40)):
        labels = right.copy()
        labels[2] = wrong
        for asked in (
            lambda labels=labels: nn.cross_entropy(logits, labels),
            lambda labels=labels: nn.cross_entropy(logits, labels, weight, label_smoothing=0.1),
            lambda labels=labels: nn.nll_loss(logits, labels),
            lambda labels=labels: nn.cross_entropy_grad(1, logits, labels),
            lambda labels=labels: nn.cross_entropy_grad(1, logits, labels, weight, reduction="sum"),
        ):
            with pytest.raises(
                ta.OutOfRangeError, match=rf"nn\.\w+: label {wrong} is not from 0 to 4"
            ) as info:
                await asked()
            assert isinstance(info.value, IndexError)
            assert info.value.index == wrong
    # The device works on.
    await nn.cross_entropy(logits, right)
    ignored = np.full(4, -100)
    assert np.isnan(await (await nn.cross_entropy(logits, ignored)).item())
    assert await (await nn.cross_entropy(logits, ignored, reduction="sum")).item() == 0


async def test_launches(device: ta.Device) -> None:
    x = await device.put(np.ones((4, 5), np.float32))
    labels = await device.put(np.zeros(4, np.int64))
    for call, count in [
        (lambda: nn.mse_loss(x, x), 1),
        (lambda: nn.mse_loss_grad(1, x, x), 1),
        (lambda: nn.binary_cross_entropy_with_logits(x, x, reduction="none"), 1),
        (lambda: nn.cross_entropy(x, labels), 3),
        (lambda: nn.cross_entropy(x, labels, label_smoothing=0.1), 4),
        (lambda: nn.nll_loss(x, labels), 2),
        (lambda: nn.cross_entropy_grad(1, x, labels), 4),
        (lambda: nn.cross_entropy_grad(1, x, labels, reduction="sum"), 3),
    ]:
        before = (await device.statistics()).launched
        await call()
        assert (await device.statistics()).launched - before == count


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    call: Any = nn
    x, labels = await device.zeros((3, 5)), np.zeros(3, int)
    for asked, error, match in (
        (lambda: call.mse_loss(x, x[0]), ValueError, r"mse_loss: x and target must have the same shape"),
        (lambda: call.mse_loss(x, 0), TypeError, "mse_loss: target must be an AccelRef or a NumPy array"),
        (
            lambda: call.mse_loss(x, x, reduction="max"),
            ValueError,
            "reduction must be 'none', 'mean' or 'sum'",
        ),
        (lambda: call.mse_loss(x, np.zeros((3, 5), int)), TypeError, "mse_loss: x is float64 and target is"),
        (lambda: call.mse_loss_grad(x, x, x), ValueError, r"mse_loss_grad: grad must have the shape \(\)"),
        (lambda: call.huber_loss(x, x, delta=-1), ValueError, "huber_loss: delta must be from 0"),
        (lambda: call.kl_div(x, x, reduction="batch"), ValueError, "'batchmean'"),
        (
            lambda: call.binary_cross_entropy_with_logits(x, x, np.ones((2, 3, 5))),
            ValueError,
            r"weight of shape \(2, 3, 5\) does not broadcast",
        ),
        (lambda: call.cross_entropy(x, labels[:2]), ValueError, r"labels must have shape \(3,\)"),
        (lambda: call.cross_entropy(x, labels * 1.0), TypeError, "labels must be integers, got float64"),
        (lambda: call.cross_entropy(x, labels > 0), TypeError, "labels must be integers, got bool"),
        (lambda: call.cross_entropy(x, 2), TypeError, "cross_entropy: labels must be an AccelRef"),
        (lambda: call.cross_entropy(x[:, :0], labels), ValueError, "needs an axis of classes"),
        (lambda: call.cross_entropy(x, labels, labels), ValueError, r"weight must have shape \(5,\)"),
        (
            lambda: call.cross_entropy(x, labels, label_smoothing=2),
            ValueError,
            "label_smoothing must be from",
        ),
        (
            lambda: call.cross_entropy(x, labels, ignore_index=0.5),
            TypeError,
            "ignore_index must be an integer",
        ),
        (lambda: call.cross_entropy(x[0, 0], labels[0]), (ValueError, TypeError), "cross_entropy: "),
        (lambda: call.cross_entropy_grad(labels, x, labels), ValueError, r"grad must have the shape \(\)"),
    ):
        with pytest.raises(error, match=match):
            await asked()


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(REDUCTIONS),
    dtype=st.sampled_from(["int8", "uint8", "int32", "uint64"]),
    seed=st.integers(0, 99),
)
async def test_any_shape(
    shape: tuple[int, ...], smoothing: float, reduction: Any, dtype: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits, weight = rng.normal(size=shape), rng.uniform(0.5, 2, shape[1])
    labels = rng.integers(0, shape[1], (shape[0], *shape[2:])).astype(dtype)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    inline = ta.DeviceOptions(isolation="inline")
    async with ta.open_system("any") as system, system.open_device(BACKEND, options=inline) as device:
        turned = (await device.put(logits.T)).T
        found = await nn.cross_entropy(turned, labels, weight, **options)
        want = entropy(logits, labels.astype(int), weight, **options)
        np.testing.assert_allclose(await found.to_host(), want, rtol=1e-11, atol=1e-13)
