"""Gradients of functions of own operations: each entry of the tables against central differences."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest

import trio_accel as ta
from trio_accel import train
from trio_accel.train import _grad

a: Any = ta.arrays
n: Any = ta.nn
matmul: Any = ta.linalg.matmul


def numbers(shape: tuple[int, ...], seed: int = 0, low: float = -2.0, high: float = 2.0) -> Any:
    return np.random.default_rng(seed).uniform(low, high, shape)


@attrs.frozen
class Case:
    """A function of parameters, and where they lie."""

    f: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((3, 4),)
    low: float = -2.0
    high: float = 2.0

    def values(self) -> list[Any]:
        return [numbers(shape, seed, self.low, self.high) for seed, shape in enumerate(self.shapes)]


X, LABELS, ROWS = (3, 4), np.array([1, 3, 0]), np.array([[0, 2], [4, 0]])
Y = numbers(X, 9, 0.1, 0.9)
SIGNS = np.where(Y > 0.5, 1.0, -1.0)
# Where the values of a function of one array lie, and what losses compare with.
RANGES = dict.fromkeys(("acos", "asin"), (-0.9, 0.9))
RANGES |= dict.fromkeys(("log", "log10", "log1p", "log2", "rsqrt", "sqrt"), (0.2, 3.0))
RANGES |= {"binary_cross_entropy": (0.1, 0.9)}
TARGETS: dict[str, Any] = {
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "kl_div"), Y),
    **dict.fromkeys(("l1_loss", "mse_loss", "poisson_nll_loss", "smooth_l1_loss"), Y),
    **dict.fromkeys(("hinge_embedding_loss", "soft_margin_loss"), SIGNS),
    "cross_entropy": LABELS,
}
OPTIONS: dict[str, tuple[Any, ...]] = {"threshold": (0.3, 0.1), "gaussian_nll_loss": (Y, np.ones(X))}


def of_first(name: str) -> Case:
    """A function of `nn`, of its first argument."""
    f = getattr(n, name)
    rest = OPTIONS.get(name, (TARGETS[name],) if name in TARGETS else ())
    return Case(lambda x: f(x, *rest), (X,), *RANGES.get(name, (-2.0, 2.0)))


IMAGE = (5, 4, 3)
MEANS, VARIANCES, MASK = numbers((4,)), numbers((4,), 1, 0.5, 2.0), numbers((3, 5), 3)


def convolutions(f: Any, axes: int) -> list[Case]:
    """Convolutions of images of so many axes: plain ones, and with all options."""
    options = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}
    return [
        Case(f, ((2, 4, *IMAGE[:axes]), (3, 4, *(2,) * axes), (3,))),
        Case(partial(f, padding="same"), ((4, *IMAGE[:axes]), (3, 4, *(3,) * axes))),
        Case(partial(f, **options), ((2, 4, *IMAGE[:axes]), (6, 2, *(2,) * axes), (6,))),
    ]


def pools(kind: str, f: Any, axes: int) -> list[Case]:
    """Pools of images of so many axes: plain ones, and with options."""
    if kind.startswith("adaptive"):
        return [Case(lambda x: f(x, 2), ((2, 3, *IMAGE[:axes]),))]
    options = {"stride": 2, "padding": 1, "ceil_mode": True}
    options |= {"count_include_pad": False} if kind == "avg" else {}
    return [
        Case(lambda x: f(x, 2), ((3, *IMAGE[:axes]),)),
        Case(lambda x: f(x, 3, **options), ((2, 3, *IMAGE[:axes]),)),
    ]


CASES: dict[str, Case | list[Case]] = {
    **{f"nn.{name}": of_first(name) for name in _grad._OF_FIRST if hasattr(n, name)},
    **{
        f"arrays.{name}": Case(getattr(a, name), (X,), *RANGES.get(name, (-2.0, 2.0)))
        for name in _grad._OF_ONE
    },
    # Both arguments are broadcast along an axis.
    **{
        f"arrays.{name}": Case(getattr(a, name), ((3, 1, 4), (2, 1)), 0.5, 2.0 + ("i" in name))
        for name in _grad._OF_TWO
        if name != "prelu"
    },
    "arrays.where": Case(lambda x, y: a.where(Y > 0.5, x, y), (X, (4,))),
    "arrays.softmax": Case(lambda x: a.softmax(x, axis=1)),
    "arrays.log_softmax": Case(lambda x: a.log_softmax(x, axis=0)),
    "AccelRef.T": Case(lambda x: x.T),
    "AccelRef.__getitem__": [
        Case(lambda x: x[1]), Case(lambda x: x[-1, 1:3]),
        Case(lambda x: x[:, None, 2:]), Case(lambda x: x[..., 1]),
    ],
    "AccelRef.copy": [Case(lambda x: x.copy()), Case(lambda x: x.cast("float64"))],
    "AccelRef.mT": Case(lambda x: x.mT, ((2, 3, 4),)),
    "AccelRef.reshape": Case(lambda x: x.reshape(2, -1)),
    "arrays.broadcast_to": Case(lambda x: a.broadcast_to(x, (2, 3, 4)), ((3, 1),)),
    "arrays.concat": Case(lambda x, y: a.concat([x, 2 * y, x], axis=1), ((3, 4), (3, 2))),
    "arrays.expand_dims": Case(lambda x: a.expand_dims(x, axis=1)),
    "arrays.layer_norm": [
        Case(a.layer_norm, ((3, 4), (4,), (4,))),
        Case(lambda x, w: a.layer_norm(x, w, axis=-1, eps=0.1), ((3, 4), (4,))),
        Case(a.layer_norm),
    ],
    "arrays.logsumexp": [
        Case(lambda x: a.logsumexp(x, axis=0)), Case(lambda x: a.logsumexp(x, keepdims=True)),
    ],
    "arrays.matrix_transpose": Case(a.matrix_transpose, ((2, 3, 4),)),
    "arrays.mean": [Case(a.mean), Case(lambda x: a.mean(x, axis=-1, keepdims=True))],
    "arrays.moveaxis": Case(lambda x: a.moveaxis(x, 0, -1), ((2, 3, 4),)),
    "arrays.permute_dims": Case(lambda x: a.permute_dims(x, (2, 0, 1)), ((2, 3, 4),)),
    "arrays.reshape": Case(lambda x: a.reshape(x, (4, 3))),
    "arrays.rms_norm": [Case(a.rms_norm, ((3, 4), (4,))), Case(lambda x: a.rms_norm(x, axis=0, eps=0.1))],
    "arrays.squeeze": Case(lambda x: a.squeeze(x, axis=1), ((3, 1, 4),)),
    "arrays.stack": Case(lambda x, y: a.stack([x, y * y, x], axis=1), ((3, 4), (3, 4))),
    "arrays.sum": [Case(a.sum), Case(lambda x: a.sum(x, axis=(0,), keepdims=True))],
    "arrays.swapaxes": Case(lambda x: a.swapaxes(x, 0, 2), ((2, 3, 4),)),
    "linalg.matmul": [
        Case(matmul, shapes)
        for shapes in (
            ((3, 4), (4, 2)), ((4,), (4, 2)), ((3, 4), (4,)), ((4,), (4,)), ((2, 3, 4), (4, 5)),
            ((3, 4), (5, 4, 2)), ((2, 1, 3, 4), (5, 4, 2)), ((4,), (2, 4, 3)),
        )
    ],
    "nn.batch_norm": [
        Case(lambda x, w, b: n.batch_norm(x, MEANS, VARIANCES, w, b), ((2, 4, 3), (4,), (4,))),
        Case(lambda x: n.batch_norm(x, MEANS, VARIANCES, eps=0.1), ((2, 4),)),
    ],
    **{f"nn.conv{k}d": convolutions(getattr(n, f"conv{k}d"), k) for k in (1, 2, 3)},
    **{
        f"nn.conv_transpose{k}d": [
            Case(getattr(n, f"conv_transpose{k}d"), ((2, 4, *IMAGE[:k]), (4, 3, *(2,) * k), (3,))),
            Case(
                partial(getattr(n, f"conv_transpose{k}d"), stride=2, padding=1, output_padding=1, groups=2),
                ((4, *IMAGE[:k]), (4, 3, *(3,) * k), (6,)),
            ),
        ]
        for k in (1, 2, 3)
    },
    **{
        f"nn.{kind}_pool{k}d": pools(kind, getattr(n, f"{kind}_pool{k}d"), k)
        for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for k in (1, 2, 3)
    },
    "nn.group_norm": [
        Case(lambda x, w, b: n.group_norm(x, 2, w, b), ((2, 4, 3, 2), (4,), (4,))),
        Case(lambda x, b: n.group_norm(x, 4, 1, b, eps=0.1), ((2, 4, 3), (4,))),
    ],
    "nn.instance_norm": Case(n.instance_norm, ((2, 4, 3, 2), (4,), (4,))),
    "nn.margin_ranking_loss": [
        Case(lambda x, y: n.margin_ranking_loss(x, y, SIGNS, margin=0.3), (X, X)),
        Case(lambda x, y: n.margin_ranking_loss(x, y, SIGNS, reduction="none"), (X, X)),
    ],
    "nn.prelu": Case(n.prelu, ((3, 4, 2), (4, 1))),
    "nn.scaled_dot_product_attention": [
        Case(n.scaled_dot_product_attention, ((2, 3, 4), (2, 5, 4), (2, 5, 6))),
        Case(lambda q, k, v: n.scaled_dot_product_attention(q, k, v, None, 0.0, True, 0.3),
             ((2, 4, 3, 4), (2, 4, 3, 4), (2, 4, 3, 4))),
        Case(lambda q, k, v: n.scaled_dot_product_attention(q, k, v, MASK, enable_gqa=True),
             ((2, 4, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4))),
    ],
    "nn.embedding": Case(lambda w: n.embedding(ROWS, w), ((5, 3),)),
    "nn.linear": [Case(n.linear, ((2, 3, 4), (5, 4), (5,))), Case(n.linear, ((3, 4), (5, 4)))],
}  # fmt: skip
NUMBERED = [
    (name, number)
    for name, cases in sorted(CASES.items())
    for number in range(len(cases) if isinstance(cases, list) else 1)
]


def test_each_entry_of_the_tables_has_a_case() -> None:
    names = {name.partition(".")[2] for name in CASES}
    assert {name.partition(".")[2] for name in _grad._RULES} | {
        *_grad._OF_ONE,
        *_grad._OF_TWO,
        *_grad._OF_FIRST,
    } == names


@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_gradients_are_those_of_differences(device: ta.Device, name: str, number: int) -> None:
    cases = CASES[name]
    case = cases[number] if isinstance(cases, list) else cases
    values = case.values()
    # Views of arrays are arrays, which are no calls.
    shape = (await (case.f(*[await device.put(one) for one in values]) * 1.0)).shape
    weights = numbers(shape, 99)

    def f(parameters: Any) -> Any:
        return a.sum(case.f(*parameters) * weights)

    value, found = await train.value_and_grad(f)([await device.put(one) for one in values])
    np.testing.assert_allclose(await value.item(), await total(device, case, values, weights), rtol=1e-12)
    for place, slope in enumerate(found):
        assert (slope.shape, slope.dtype) == (values[place].shape, "float64")
        # Along a direction: each element for itself would ask a thousand times.
        direction = numbers(values[place].shape, 50, -1.0, 1.0)
        sides = []
        for sign in (1, -1):
            moved = [one.copy() for one in values]
            moved[place] += sign * 1e-5 * direction
            sides.append(await total(device, case, moved, weights))
        want = (sides[0] - sides[1]) / 2e-5
        np.testing.assert_allclose((await slope.to_host() * direction).sum(), want, rtol=1e-6, atol=1e-8)


async def total(device: ta.Device, case: Case, values: list[Any], weights: Any) -> float:
    made = await (case.f(*[await device.put(one) for one in values]) * 1.0)
    return float((await made.to_host() * weights).sum())


async def test_parameters_in_dicts_and_lists_that_are_used_twice_or_never(device: ta.Device) -> None:
    given = {
        "w": [await device.put(numbers((3,))), await device.put(numbers((3,), 1))],
        "never": await device.put(Y),
    }

    def f(p: Any, x: Any) -> Any:
        return a.sum(p["w"][0] * p["w"][0] * x + a.exp(p["w"][1]) * p["w"][0])

    x = await device.put(numbers((3,), 2))
    value, found = await train.value_and_grad(f)(given, x)
    w, v, hosts = numbers((3,)), numbers((3,), 1), numbers((3,), 2)
    np.testing.assert_allclose(await value.item(), (w * w * hosts + np.exp(v) * w).sum(), rtol=1e-14)
    np.testing.assert_allclose(await found["w"][0].to_host(), 2 * w * hosts + np.exp(v), rtol=1e-14)
    np.testing.assert_allclose(await found["w"][1].to_host(), np.exp(v) * w, rtol=1e-14)
    assert not (await found["never"].to_host()).any()
    alone = await train.grad(f)(given, x)
    np.testing.assert_array_equal(await alone["w"][1].to_host(), await found["w"][1].to_host())


# Powers whose base is 0, negative or positive, with exponents of any sign.
BASES = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 3.0, -2.0, -2.0])
EXPONENTS = np.array([0.0, 1.0, 2.0, 0.5, 3.0, -1.0, 0.0, -1.5, 2.5, 0.0, 3.0])


def slopes_of_powers(a: Any, b: Any) -> tuple[Any, Any]:
    """The derivatives of a ** b, as PyTorch has them: a power of 0 does not change with its exponent."""
    with np.errstate(all="ignore"):
        of_base = np.where(b == 0, 0.0, b * a ** (b - 1))
        of_exponent = np.where((a == 0) & (b >= 0), 0.0, a**b * np.log(a))
    return of_base, of_exponent


@pytest.mark.parametrize("dtype", ["float64", "float32"])
async def test_powers_of_arrays(device: ta.Device, dtype: str) -> None:
    hosts = BASES.astype(dtype), EXPONENTS.astype(dtype)
    a_on, b_on = [await device.put(one) for one in hosts]
    want = slopes_of_powers(BASES, EXPONENTS)
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    both = await train.grad(lambda p: a.sum(p[0] ** p[1]))([a_on, b_on])
    alone = [
        await train.grad(lambda p: a.sum(p ** hosts[1]))(a_on),
        await train.grad(lambda p: a.sum(hosts[0] ** p))(b_on),
    ]
    for found in (both, alone):
        for slope, expected in zip(found, want, strict=True):
            assert slope.dtype == dtype
            np.testing.assert_allclose(await slope.to_host(), expected, rtol=tolerance)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 0.5, -1, -2, 0.0, 2.0, np.float64(0.0), np.float32(2.0)])
async def test_powers_with_numbers(device: ta.Device, number: Any) -> None:
    for place, host in enumerate((BASES, np.array([0.0, 0.5, 1.0, 2.0, -1.0]))):
        if place == 1 and number < 0:
            continue
        x = await device.put(host)
        f = (lambda p: a.sum(p**number)) if place == 0 else (lambda p: a.sum(number**p))
        want = slopes_of_powers(*((host, np.float64(number)) if place == 0 else (np.float64(number), host)))[
            place
        ]
        np.testing.assert_allclose(await (await train.grad(f)(x)).to_host(), want, rtol=1e-12)


OPERATORS = ["add", "sub", "mul", "truediv", "pow", "mod", "matmul"]


@pytest.mark.parametrize("is_reflected", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
async def test_operators_with_what_is_on_the_host(device: ta.Device, name: str, is_reflected: bool) -> None:
    f, host = getattr(operator, name), numbers((3, 3), 1, 0.3, 2.0)
    x, direction = await device.put(host), numbers((3, 3), 2)
    for other in (
        2.7,
        2,
        np.float64(1.3),
        np.float32(1.5),
        numbers((3, 3), 3, 0.3, 2.0),
        numbers((3,), 4, 0.3, 2.0),
    ):
        if name == "matmul" and not np.ndim(other):
            continue
        of: Any = (
            (lambda p, other=other: f(other, p)) if is_reflected else (lambda p, other=other: f(p, other))
        )
        found = await train.grad(lambda p, of=of: a.sum(of(p)))(x)
        want = (of(host + 1e-6 * direction).sum() - of(host - 1e-6 * direction).sum()) / 2e-6
        np.testing.assert_allclose((await found.to_host() * direction).sum(), want, rtol=1e-7)


@pytest.mark.filterwarnings("error:.*was never awaited:RuntimeWarning")
async def test_nothing_is_left_of_calls_that_nobody_else_has_made(device: ta.Device) -> None:
    """Neither by gradients of some arguments alone, nor by a refusal after some of them were made."""
    x, w, v = [await device.put(numbers(shape, 1)) for shape in ((3, 4), (4, 4), (4,))]
    hosts = [numbers(shape, 2) for shape in ((3, 4), (4, 4), (4,))]
    for f, given in (
        (lambda p: a.sum(hosts[0] @ p), v),
        (lambda p: a.sum(p @ hosts[1]), v),
        (lambda p: a.sum(n.linear(x, w, p)), v),
        (lambda p: a.sum(a.layer_norm(x, 1, p)), v),
        (lambda p: a.sum(a.layer_norm(x, p, 0)), v),
        (lambda p: a.sum(n.batch_norm(x, v, v * v + 1.0, 1, p)), v),
    ):
        assert (await train.grad(f)(given)).shape == given.shape
    refused: list[Callable[[Any], Any]] = [
        lambda p: a.sum(a.exp(a.sort(p * 2.0) + p)), lambda p: a.sum(a.exp(p[::2] * 2.0)),
        lambda p: n.mse_loss(p * 2.0, p + 1.0), lambda p: a.exp(p) * 2.0, lambda p: a.sum(a.sign(p) * 2.0),
    ]  # fmt: skip
    for f in refused:
        with pytest.raises((ta.NotSupportedError, ValueError)):
            await train.value_and_grad(f)(x)
    gc.collect()


async def test_what_has_no_gradient_is_refused(device: ta.Device) -> None:
    x = await device.put(Y)
    for f, kind, says in (
        (lambda p: a.sum(a.sort(p)), ta.NotSupportedError, "arrays.sort has no gradient here"),
        (lambda p: a.sum(p[::2]), ta.NotSupportedError, "slices of step 1"),
        (lambda p: n.mse_loss(p, p), ta.NotSupportedError, "mse_loss has no gradient for an argument"),
        (lambda p: p * 2, ValueError, r"the value must have no axes, got shape \(3, 4\)"),
        (lambda p: a.sum(x * 2), ValueError, "the value depends on no parameter"),
        (lambda p: a.sum(a.sign(p)), ValueError, "the value depends on no parameter"),
        (lambda p: 3.0, TypeError, "the function must return a call, got float"),
    ):
        with pytest.raises(kind, match=says):
            await train.value_and_grad(f)(x)
    with pytest.raises(
        TypeError, match="parameters must be arrays on a device, in dicts and lists, got ndarray"
    ):
        await train.value_and_grad(a.sum)(Y)
