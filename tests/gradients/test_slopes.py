"""Each slope of `nn` at 0, at bounds, at infinities and at NaN: `*_grad`, `ta.grad` and PyTorch."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import trio_accel as ta

n: Any = ta.nn
a: Any = ta.arrays
INF, NAN = np.inf, np.nan
HOST = np.array([3.0, 1.0, -2.0])
POINTS = (0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 6.0, -6.0, 40.0, -40.0, 1e-4, INF, -INF, NAN)
PROBABILITIES = (0.0, 1.0, 0.25, 1e-9)
ANY = (0.0, 1.0, -0.5, 2.0, INF, -INF, NAN)
COUNTS = (0.0, 1.0, 3.5)
SIGNS = (1.0, -1.0)

ACTIVATIONS: dict[str, list[dict[str, Any]]] = {
    "celu": [{}, {"alpha": 2.5}],
    "elu": [{}, {"alpha": 0.5}],
    "gelu": [{}, {"approximate": "tanh"}],
    "hardshrink": [{}, {"lambd": 2.0}],
    "hardsigmoid": [{}],
    "hardswish": [{}],
    "hardtanh": [{}, {"min_val": -0.5, "max_val": 2.0}],
    "leaky_relu": [{}, {"negative_slope": 0.0}],
    "log_sigmoid": [{}],
    "mish": [{}],
    "prelu": [{"weight": 0.25}, {"weight": 0.0}],
    "relu": [{}],
    "relu6": [{}],
    "selu": [{}],
    "sigmoid": [{}],
    "silu": [{}],
    "softplus": [{}, {"beta": 3.0}],
    "softshrink": [{}, {"lambd": 2.0}],
    "softsign": [{}],
    "tanh": [{}],
    "tanhshrink": [{}],
    "threshold": [{"threshold": 1.0, "value": -2.0}],
}
# The points, the targets, and the options. An element has each point with each target.
LOSSES: dict[str, tuple[tuple[float, ...], tuple[float, ...], list[dict[str, Any]]]] = {
    "binary_cross_entropy": ((0.0, 1.0, 0.5, 1e-9, NAN), PROBABILITIES, [{}, {"weight": 3.0}]),
    "binary_cross_entropy_with_logits": (POINTS, PROBABILITIES, [{}, {"weight": 3.0, "pos_weight": 2.0}]),
    "gaussian_nll_loss": (POINTS, ANY, [{"var": 0.25}, {"var": 0.0}]),
    "hinge_embedding_loss": (POINTS, SIGNS, [{}, {"margin": 2.0}]),
    "huber_loss": (POINTS, ANY, [{}, {"delta": 0.5}]),
    "kl_div": (POINTS, PROBABILITIES, [{}, {"log_target": True}]),
    "l1_loss": (POINTS, ANY, [{}]),
    "margin_ranking_loss": (POINTS, SIGNS, [{"x2": 1.0}, {"x2": 1.0, "margin": 2.0}]),
    "mse_loss": (POINTS, ANY, [{}]),
    "poisson_nll_loss": (POINTS, COUNTS, [{}, {"log_input": False}, {"full": True}]),
    "smooth_l1_loss": (POINTS, ANY, [{}, {"beta": 0.5}, {"beta": 0.0}]),
    "soft_margin_loss": (POINTS, SIGNS, [{}]),
}
# They compute no slope of each element, or have several results.
OTHERS = {
    *("cross_entropy", "glu", "log_softmax", "softmax"),
    *("batch_norm_training", "group_norm", "instance_norm", "layer_norm", "rms_norm"),
    *("adaptive_avg_pool", "avg_pool", "conv_bias", "conv_input", "conv_weight", "max_pool"),
    *("dropout", "embedding", "linear_input", "linear_weight", "scaled_dot_product_attention"),
}
SCALE, ALPHA = 1.0507009873554805, 1.6732632423543772
# The functions with a derived slope, in NumPy. Decision 155 has the others, with reasons.
DERIVED: dict[str, Callable[..., Any]] = {
    "elu": lambda g, x, alpha=1.0: np.where(x > 0, g, g * alpha * np.exp(np.minimum(x, 0))),
    "hardshrink": lambda g, x, lambd=0.5: np.where(np.abs(x) <= lambd, 0, g),
    "hardsigmoid": lambda g, x: np.where((x <= -3) | (x >= 3), 0, g / 6),
    "hardtanh": lambda g, x, min_val=-1.0, max_val=1.0: np.where((x <= min_val) | (x >= max_val), 0, g),
    "l1_loss": lambda g, x, target: g * np.sign(x - target),
    "mse_loss": lambda g, x, target: 2 * (g * (x - target)),
    "relu": lambda g, x: np.where(x <= 0, 0, g),
    "relu6": lambda g, x: np.where((x <= 0) | (x >= 6), 0, g),
    "selu": lambda g, x: SCALE * g * np.where(x > 0, 1, ALPHA * np.exp(np.minimum(x, 0))),
    "threshold": lambda g, x, threshold, value: np.where(x <= threshold, 0, g),
}
GRADIENTS = (1.0, -3.3, 0.0, -0.0, 1e-3, INF, -INF, NAN)
# Some of PyTorch's constants, such as 1 / 6 in hardsigmoid, have the digits of float32.
TOLERANCE = 5e-8
# PyTorch's names, where they are others.
NAMES = {"log_sigmoid": "logsigmoid"}
each_activation = pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name, several in ACTIVATIONS.items() for options in several]
)
each_loss = pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name, (*_, several) in LOSSES.items() for options in several]
)


def pairs(name: str) -> list[Any]:
    """Return the predictions and the targets of a loss."""
    points, targets, _ = LOSSES[name]
    x, target = np.meshgrid(points, targets)
    return [x.ravel(), target.ravel()]


async def by_tape_of(f: Any, x: Any, *args: Any, **named: Any) -> Any:
    """Return the slopes of a function by `ta.grad`, without the other arguments."""

    def total(x: Any) -> Any:
        return a.sum(f(x, *args, **named))

    return await (await ta.grad(total)(x)).to_host()


async def ours(name: str, device: ta.Device, host: list[Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the gradients by the public function and by `ta.grad`."""
    x, *others = [await device.put(one) for one in host]
    named = dict(options)
    if "x2" in named:
        others.insert(0, await device.put(np.full_like(host[0], named.pop("x2"))))
    if name in LOSSES:
        named["reduction"] = "none"
    f = a.tanh if name == "tanh" else getattr(n, name)
    by_function = await getattr(n, f"{name}_grad")(
        await device.put(np.ones_like(host[0])), x, *others, **named
    )
    return await by_function.to_host(), await by_tape_of(f, x, *others, **named)


def test_each_slope_has_a_case() -> None:
    names = {name.removesuffix("_grad") for name in n.__all__ if name.endswith("_grad")}
    assert names == {*ACTIVATIONS, *LOSSES, *OTHERS}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@each_activation
async def test_activations(device: ta.Device, name: str, options: dict[str, Any], dtype: str) -> None:
    by_function, by_tape = await ours(name, device, [np.array(POINTS, dtype)], options)
    eps = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(by_tape, by_function, rtol=4 * eps, atol=eps if name == "tanh" else 0)
    assert np.isfinite(by_function[:-1]).all()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@each_loss
async def test_losses(device: ta.Device, name: str, options: dict[str, Any], dtype: str) -> None:
    host = [one.astype(dtype) for one in pairs(name)]
    by_function, by_tape = await ours(name, device, host, options)
    # A gradient has the dtype of its argument, and the weights of the tape make others float64.
    np.testing.assert_array_equal(by_tape, by_function.astype(dtype))
    assert np.isfinite(by_function[np.isfinite(host[0]) & np.isfinite(host[1])]).all()


def test_each_slope_is_derived_or_by_hand_with_a_reason() -> None:
    page = Path(__file__).parents[2] / "docs/design/decisions/155-networks-of-expressions.md"
    rows = re.findall(r"^\| (`.*`) \| (.+) \|$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    names = " ".join(cell for cell, _ in rows).replace("`", "").split()
    assert len(names) == len(set(names))
    assert {*names}.isdisjoint(DERIVED)
    assert {*names, *DERIVED, "tanh"} == {*ACTIVATIONS, *LOSSES}
    words = {name: ta.gradients.words()[f"nn.{name}"][0] for name in (*names, *DERIVED)}
    # The gradient of a function of several operations is derived from its body, and reads the slope by hand.
    assert {words[name] for name in DERIVED} == {"derived"}
    assert {words[name] for name in names} == {"derived", "rule"}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("name", DERIVED)
async def test_derived_slopes(device: ta.Device, name: str, dtype: str) -> None:
    """Derived slopes have the bits of formulas, also at seams and for infinite gradients and NaN."""
    points, targets, several = LOSSES.get(name) or (POINTS, (0.0,), ACTIVATIONS[name])
    seams = [np.nextafter(np.array(points, dtype), np.array(to, dtype)) for to in (-INF, INF)]
    host = [np.concatenate([np.array(points, dtype), *seams]), *np.array([targets, GRADIENTS], dtype=object)]
    x, target, g = (one.ravel().astype(dtype) for one in np.meshgrid(*host))
    others, how = ([target], {"reduction": "none"}) if name in LOSSES else ([], {})
    wide = "float64" if dtype == "float64" else "float32"
    for options in several:
        on = [await device.put(one) for one in (g, x, *others)]
        found = await (await getattr(n, f"{name}_grad")(*on, **options, **how)).to_host()
        with np.errstate(all="ignore"):
            want = DERIVED[name](*[one.astype(wide) for one in (g, x, *others)], **options).astype(dtype)
        eps = float(np.finfo(dtype).eps)
        is_exact = name not in ("elu", "selu")
        np.testing.assert_allclose(found, want, rtol=0 if is_exact else 2 * eps, atol=0)
        is_number = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(found)[is_number], np.signbit(want)[is_number])


async def test_a_slope_is_derived_at_its_first_use() -> None:
    """Neither the import of the package nor that of `nn` derives a slope, and no gradient by hand does."""
    code = """
import sys
import trio_accel as ta
ta.nn.relu, ta.nn.silu_grad.expression.text
assert "trio_accel.derivatives._derive" not in sys.modules
ta.nn.relu_grad.expression.text
assert "trio_accel.derivatives._derive" in sys.modules
"""
    await trio.run_process([sys.executable, "-c", code])


async def test_arguments_by_name(device: ta.Device) -> None:
    """A rule finds an argument by its place and by its name."""
    x = await device.put(np.array([1.0, -2.0, 0.5]))

    def by_place(x: Any) -> Any:
        return n.mse_loss(n.prelu(x, 0.25), x.shape[0] * np.ones(3)) + a.sum(a.softmax(x, 0) * HOST)

    def by_name(x: Any) -> Any:
        target = x.shape[0] * np.ones(3)
        return n.mse_loss(target=target, x=n.prelu(weight=0.25, x=x)) + a.sum(a.softmax(axis=0, x=x) * HOST)

    found, want = [await (await ta.grad(f)(x)).to_host() for f in (by_name, by_place)]
    np.testing.assert_array_equal(found, want)
    assert (found != 0).all()


# PyTorch, which has two loops for many functions, of single elements and of vectors: they differ at NaN.


def theirs(name: str, host: list[Any], options: dict[str, Any]) -> Any:
    """Return the slopes that PyTorch's loops of single elements have."""
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    place = torch if name in ("sigmoid", "tanh") else torch.nn.functional
    f = getattr(place, NAMES.get(name, name))
    named = dict(options)
    for option in {"weight", "var", "pos_weight"} & named.keys():
        named[option] = torch.tensor([named[option]], dtype=torch.float64)
    if name in LOSSES:
        named["reduction"] = "none"
    x2 = [torch.tensor([named.pop("x2")])] if "x2" in named else []
    found: list[float] = []
    values: Any
    for values in zip(*host, strict=True):
        x, *target = [torch.tensor([one]) for one in values]
        x.requires_grad = True
        f(x, *x2, *target, **named).sum().backward()
        found.append(x.grad.item())
    return np.array(found)


@each_activation
async def test_activations_of_pytorch(device: ta.Device, name: str, options: dict[str, Any]) -> None:
    host = np.array(POINTS)
    want = theirs(name, [host], options)
    found, _ = await ours(name, device, [host], options)
    # The limits at infinities, where PyTorch multiplies infinities by 0.
    want[-3:-1] = np.where(np.isnan(want[-3:-1]), found[-3:-1], want[-3:-1])
    np.testing.assert_allclose(found[:-1], want[:-1], rtol=TOLERANCE, atol=1e-15)
    if name != "hardsigmoid":
        assert np.isnan(found[-1]) or found[-1] == want[-1]


@each_loss
async def test_losses_of_pytorch(device: ta.Device, name: str, options: dict[str, Any]) -> None:
    host = pairs(name)
    if name == "binary_cross_entropy":
        host = [one[~np.isnan(host[0])] for one in host]  # PyTorch refuses NaN
    x, target = host
    want = theirs(name, host, options)
    found, _ = await ours(name, device, host, options)
    if name in ("hinge_embedding_loss", "margin_ranking_loss"):
        # At a bound the slope is 0, like the slope of `relu`. PyTorch takes the slope of the other side.
        margin = options.get("margin", 1.0 if name == "hinge_embedding_loss" else 0.0)
        is_met = (x == margin) & (target < 0) if name[0] == "h" else target * (x - options["x2"]) == margin
        assert is_met.any()
        np.testing.assert_array_equal(found[is_met], 0.0)
        want[is_met] = 0.0
    # NaN stays NaN, and so does a difference of infinities. Other infinities have the limits.
    is_open = np.isnan(x) | np.isnan(target) | (np.isinf(x) & (x == target))
    want[is_open] = np.where(np.isnan(found), found, want)[is_open]
    want[np.isinf(x) & np.isnan(want)] = found[np.isinf(x) & np.isnan(want)]
    np.testing.assert_allclose(found, want, rtol=TOLERANCE, atol=1e-15)
    assert not np.isnan(found[~is_open]).any()
