"""Parts of a training step besides layers: embeddings, dropout, optimizers; and a loop of all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.special
from array_numbers import numbers
from differences import gradient, widest

import trio_accel as ta
from trio_accel import nn

WIDE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6, "float64": 1e-13}


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (3,), (3, 4)])
async def test_embedding(device: ta.Device, name: str, shape: tuple[int, ...]) -> None:
    table, indices = numbers((6, 5), name), np.random.default_rng(2).integers(0, 6, shape)
    on, at = await device.put(table), await device.put(np.asarray(indices).astype("uint8"))
    found = await nn.embedding(at, on)
    assert found.dtype == name
    np.testing.assert_array_equal(widest(await found.to_host()), widest(table[indices]))
    grad = numbers((*shape, 5), name, 7)
    for padding in (None, 2, -1):
        slope = await nn.embedding_grad(await device.put(grad), at, 6, padding)
        want = gradient(lambda each: each[indices], widest(table), widest(grad))
        if padding is not None:
            want[padding] = 0
        assert (slope.shape, slope.dtype) == ((6, 5), name)
        np.testing.assert_allclose(widest(await slope.to_host()), want, rtol=max(WIDE[name], 1e-8), atol=1e-8)


async def test_many_half_gradients_of_one_row(device: ta.Device) -> None:
    grad, indices = await device.put(np.ones((4000, 2), np.float16)), np.zeros(4000, int)
    found = await nn.embedding_grad(grad, indices, 3)
    np.testing.assert_array_equal(await found.to_host(), [[4000, 4000], [0, 0], [0, 0]])


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_indices_are_checked(device: ta.Device) -> None:
    table, grad = await device.zeros((4, 2)), await device.zeros((2, 2))
    for wrong in (4, -1, -5, 1 << 40):
        indices = np.array([1, wrong])
        for asked in (
            lambda at=indices: nn.embedding(at, table),
            lambda at=indices: nn.embedding_grad(grad, at, 4),
        ):
            with pytest.raises(ta.OutOfRangeError, match=rf"nn\.\w+: index {wrong} is not from 0 to 3"):
                await asked()
    await nn.embedding(np.array([0, 3]), table)


async def test_dropout(device: ta.Device) -> None:
    x = numbers((300, 400), "float32")
    on = await device.put(x)
    for p in (0.0, 0.25, 0.5, 1.0):
        made = await nn.dropout(on, p, generator=ta.random.Generator(device, seed=5))
        mask, y = await made.mask.to_host(), await made.y.to_host()
        assert (mask.dtype, y.dtype) == (bool, "float32")
        # Four deviations of the binomial distribution.
        assert abs(mask.mean() - (1 - p)) <= 4 * np.sqrt(p * (1 - p) / x.size)
        scale = 1 / (1 - p) if p < 1 else 0
        np.testing.assert_allclose(y, np.where(mask, x * scale, 0), rtol=1e-6)
        slope = await nn.dropout_grad(on, made.mask, p)
        np.testing.assert_array_equal(await slope.to_host(), y)
    drawn = await ta.random.Generator(device, seed=5).uniform(x.shape, "float32")
    half = await nn.dropout(await device.put(x.astype("f2")), generator=ta.random.Generator(device, seed=5))
    assert half.y.dtype == "float16"
    np.testing.assert_array_equal(await half.mask.to_host(), await drawn.to_host() > 0.5)


def sgd(
    p: Any, grads: Any, lr: float, momentum: float, dampening: float, decay: float, nesterov: bool
) -> Any:
    """The formulas of `torch.optim.SGD`."""
    buffer = None
    for grad in grads:
        g = grad + decay * p
        if momentum:
            buffer = g if buffer is None else momentum * buffer + (1 - dampening) * g
            g = g + momentum * buffer if nesterov else buffer
        p = p - lr * g
    return p


def adam(p: Any, grads: Any, lr: float, betas: Any, eps: float, decay: float, is_apart: bool) -> Any:
    """The formulas of the papers."""
    m = v = 0.0
    for step, grad in enumerate(grads, 1):
        if is_apart:
            p = p * (1 - lr * decay)
        g = grad if is_apart else grad + decay * p
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        corrected = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
        p = p - lr * corrected[0] / (np.sqrt(corrected[1]) + eps)
    return p


STEPS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.3},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.8, "nesterov": True},
]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("options", STEPS)
async def test_sgd(device: ta.Device, options: dict[str, Any], name: str) -> None:
    p, grads = numbers((4, 5), name), [numbers((4, 5), name, seed) for seed in range(3)]
    on = await device.put(p)
    buffer = await device.zeros((4, 5), name) if "momentum" in options else None
    for number, grad in enumerate(grads):
        first = buffer is not None and number == 0
        assert await nn.sgd(on, await device.put(grad), buffer, is_first=first, **options) is on
    want = sgd(
        widest(p),
        [widest(grad) for grad in grads],
        options["lr"],
        options.get("momentum", 0),
        options.get("dampening", 0),
        options.get("weight_decay", 0),
        options.get("nesterov", False),
    )
    np.testing.assert_allclose(widest(await on.to_host()), want, rtol=WIDE[name], atol=WIDE[name])


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
@pytest.mark.parametrize("function", ["adam", "adamw"])
@pytest.mark.parametrize("options", [{}, {"lr": 0.1, "betas": (0.5, 0.0), "eps": 0.1, "weight_decay": 0.3}])
async def test_adam(device: ta.Device, function: str, options: dict[str, Any], name: str) -> None:
    p, grads = numbers((4, 5), name), [numbers((4, 5), name, seed) for seed in range(4)]
    on = await device.put(p)
    # The state of a narrow parameter is wider.
    wide = "float32" if name == "float16" else name
    states = [await device.zeros((4, 5), wide) for _ in range(2)]
    for step, grad in enumerate(grads, 1):
        assert await getattr(nn, function)(on, grad, *states, step, **options) is on
    is_apart = function == "adamw"
    given = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2 if is_apart else 0,
    } | options
    want = adam(
        widest(p),
        [widest(grad) for grad in grads],
        given["lr"],
        given["betas"],
        given["eps"],
        given["weight_decay"],
        is_apart,
    )
    np.testing.assert_allclose(widest(await on.to_host()), want, rtol=WIDE[name], atol=WIDE[name])


async def test_launches(device: ta.Device) -> None:
    arrays = [await device.put(np.ones((3, 4), np.float32)) for _ in range(4)]
    generator, indices = ta.random.Generator(device, seed=1), await device.put(np.zeros(3, int))
    for call, count in [
        (lambda: nn.sgd(*arrays[:2]), 1),
        (lambda: nn.sgd(*arrays[:3], momentum=0.9), 1),
        (lambda: nn.adam(*arrays, 1), 1),
        (lambda: nn.adamw(*arrays, 1), 1),
        (lambda: nn.dropout(arrays[0], generator=generator), 2),
        (lambda: nn.embedding(indices, arrays[0]), 1),
        (lambda: nn.embedding_grad(arrays[0], indices, 5), 2),
    ]:
        before = (await device.statistics()).launched
        await call()
        assert (await device.statistics()).launched - before == count


async def test_sgd_in_a_graph(device: ta.Device) -> None:
    if "graphs" not in device.libraries:
        pytest.skip("the backend has no graphs")
    p, grad = numbers((4, 5), "float32"), numbers((4, 5), "float32", 4)
    on, buffer = await device.put(p), await device.zeros((4, 5), "float32")
    slope = await device.put(grad)

    async def step() -> ta.AccelRef:
        return await nn.sgd(on, slope, buffer, lr=0.1, momentum=0.9)

    graph = await ta.graphs.capture(device, step)
    for _ in range(3):
        await graph()
    want = sgd(widest(p), [widest(grad)] * 3, 0.1, 0.9, 0.0, 0.0, nesterov=False)
    np.testing.assert_allclose(await on.to_host(), want, rtol=1e-5)


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    call: Any = nn
    p, g, m, v = [await device.zeros((3, 2)) for _ in range(4)]
    whole, at = await device.zeros((3, 2), "int32"), np.zeros(3, int)
    for asked, error, match in (
        (lambda: call.sgd(p, g[0]), ValueError, r"nn\.sgd: grad must have the shape \(3, 2\) of param"),
        (lambda: call.sgd(np.zeros((3, 2)), g), TypeError, r"nn\.sgd: param must be an AccelRef, which"),
        (lambda: call.sgd(p, whole), TypeError, "grad must be of floating numbers, got int32"),
        (lambda: call.sgd(p, g, lr=-1.0), ValueError, "lr must be from 0 below inf, got -1.0"),
        (lambda: call.sgd(p, g, lr=float("nan")), ValueError, "lr must be from 0"),
        (lambda: call.sgd(p, g, momentum=0.9), ValueError, "momentum and momentum_buffer go together"),
        (lambda: call.sgd(p, g, m), ValueError, "momentum and momentum_buffer go together"),
        (lambda: call.sgd(p, g, m, momentum=0.9, dampening=0.1, nesterov=True), ValueError, "nesterov needs"),
        (lambda: call.sgd(p, g, p, momentum=0.9), ValueError, "must not share memory"),
        (lambda: call.adam(p, g, m, v, 0), ValueError, r"nn\.adam: step must be at least 1, got 0"),
        (lambda: call.adam(p, g, m, v, 1.0), TypeError, r"nn\.adam: step must be an integer"),
        (lambda: call.adam(p, g, m, v, 1, betas=0.9), TypeError, "betas must be two numbers"),
        (lambda: call.adam(p, g, m, v, 1, betas=(0.9, 1.0)), ValueError, "betas must be from 0 below 1"),
        (lambda: call.adamw(p, g, m, v[:1], 1), ValueError, r"nn\.adamw: exp_avg_sq must have the shape"),
        (lambda: call.embedding(at * 1.0, p), TypeError, "indices must be integers, got float64"),
        (lambda: call.embedding(at, p[0]), ValueError, r"weight must have shape \(V, D\), got shape \(2,\)"),
        (lambda: call.embedding(at, p, 3), ValueError, "padding_idx must be a row of 3, got 3"),
        (lambda: call.embedding(at, p, 0.5), TypeError, "padding_idx must be an integer or None"),
        (lambda: call.embedding_grad(p[0], at, 3), ValueError, "embedding_grad: grad must have the shape"),
        (lambda: call.embedding_grad(p, at, 3.0), TypeError, "num_embeddings must be an integer"),
        (
            lambda: call.dropout(p, 1.5, generator=None),
            ValueError,
            "dropout: p must be from 0 up to 1, got 1.5",
        ),
        (lambda: call.dropout(p, generator=3), TypeError, "generator must be a random.Generator, got int"),
        (lambda: call.dropout_grad(p, p), TypeError, "dropout_grad: mask must be of bool"),
        (lambda: call.dropout_grad(p, p[:1]), ValueError, "grad and mask must have the same shape"),
    ):
        with pytest.raises(error, match=match):
            await asked()


# A net of two layers on points of two spirals: 40 steps, by NumPy in float64 and on the device.
STEPS_OF_TRAINING, HIDDEN = 40, 16


def spirals() -> tuple[Any, Any]:
    rng, angle = np.random.default_rng(1), np.linspace(0.5, 3, 60)
    arm = np.stack([angle * np.cos(2 * angle), angle * np.sin(2 * angle)], 1)
    x = np.concatenate([arm, -arm]) + rng.normal(0, 0.05, (120, 2))
    return x, np.repeat([0, 1], 60)


def initial() -> list[Any]:
    rng = np.random.default_rng(2)
    return [rng.normal(0, 0.7, (2, HIDDEN)), np.zeros(HIDDEN), rng.normal(0, 0.3, (HIDDEN, 2)), np.zeros(2)]


def by_numpy() -> tuple[list[float], list[Any]]:
    (x, labels), parameters, losses = spirals(), initial(), []
    moments = [[0.0, 0.0] for _ in parameters]
    for step in range(1, STEPS_OF_TRAINING + 1):
        w1, b1, w2, b2 = parameters
        z = x @ w1 + b1
        h = z * scipy.special.ndtr(z)
        logits = h @ w2 + b2
        logs = scipy.special.log_softmax(logits, 1)
        losses.append(-logs[np.arange(len(x)), labels].mean())
        dlogits = (np.exp(logs) - np.eye(2)[labels]) / len(x)
        density = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
        dz = dlogits @ w2.T * (scipy.special.ndtr(z) + z * density)
        for place, grad in enumerate((x.T @ dz, dz.sum(0), h.T @ dlogits, dlogits.sum(0))):
            m, v = moments[place]
            m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad * grad
            moments[place] = [m, v]
            parameters[place] = parameters[place] * (1 - 0.05 * 0.01) - 0.05 * (m / (1 - 0.9**step)) / (
                np.sqrt(v / (1 - 0.999**step)) + 1e-8
            )
    return losses, parameters


async def trained(device: ta.Device, dtype: str) -> tuple[list[float], list[Any]]:
    x, labels = spirals()
    on, at, losses = await device.put(x.astype(dtype)), await device.put(labels), []
    parameters = [await device.put(each.astype(dtype)) for each in initial()]
    moments = [[await device.zeros(each.shape, dtype) for _ in range(2)] for each in parameters]
    matmul, add, total = ta.linalg.matmul, ta.arrays.add, ta.arrays.sum
    for step in range(1, STEPS_OF_TRAINING + 1):
        w1, b1, w2, b2 = parameters
        z = await add(await matmul(on, w1), b1)
        h = await nn.gelu(z)
        logits = await add(await matmul(h, w2), b2)
        losses.append(float(await (await nn.cross_entropy(logits, at)).item()))
        dlogits = await nn.cross_entropy_grad(1, logits, at)
        dz = await nn.gelu_grad(await matmul(dlogits, w2.T), z)
        grads = (
            await matmul(on.T, dz),
            await total(dz, axis=0),
            await matmul(h.T, dlogits),
            await total(dlogits, axis=0),
        )
        for parameter, grad, states in zip(parameters, grads, moments, strict=True):
            await nn.adamw(parameter, grad, *states, step, lr=0.05)
    return losses, [await each.to_host() for each in parameters]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
async def test_a_training_loop_is_that_of_numpy(device: ta.Device, dtype: str) -> None:
    want, expected = by_numpy()
    losses, parameters = await trained(device, dtype)
    assert want[-1] < want[0] / 3
    tolerance = 1e-9 if dtype == "float64" else 2e-3
    np.testing.assert_allclose(losses, want, rtol=tolerance)
    for got, each in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(got, each, rtol=tolerance * 10, atol=tolerance * 10)
