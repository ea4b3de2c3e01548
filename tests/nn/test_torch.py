"""Gradients and steps of optimizers against PyTorch's own in float64, where it is installed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from dnn_references import Array, numbers
from test_activations import OPTIONS, smooth

import trio_accel as ta
from trio_accel import nn

torch: Any = pytest.importorskip("torch")
F: Any = torch.nn.functional
call: Any = nn
# PyTorch's names, where they are others.
NAMES = {"log_sigmoid": "logsigmoid"}


class Case(NamedTuple):
    """A function with its gradients for `arrays`, by PyTorch and by ours."""

    arrays: list[Array]
    torchs: Callable[..., Any]
    ours: Callable[..., Awaitable[Any]]
    """Gets the gradient of the results, and the arrays on the device."""


def slopes(case: Case) -> tuple[Array, list[Array]]:
    """Return a gradient of the results, and PyTorch's gradients of all arrays for it."""
    tensors = [torch.tensor(array, requires_grad=True) for array in case.arrays]
    made = case.torchs(*tensors)
    grad = numbers(tuple(made.shape), seed=9)
    made.backward(torch.tensor(grad))
    return grad, [tensor.grad.numpy() for tensor in tensors]


def loss(name: str, target: Array, **options: Any) -> Case:
    x = smooth(name, (6, 10))
    there = torch.tensor(target)
    return Case(
        [x],
        lambda x: getattr(F, name)(x, there, **options),
        lambda grad, x: getattr(nn, f"{name}_grad")(grad, x, target, **options),
    )


def norm(name: str, *options: Any, ours: str = "", axes: Any = None) -> Case:
    weight = (10,) if name in ("layer_norm", "rms_norm") else (6,)

    def torchs(x: Any, weight: Any, bias: Any = None) -> Any:
        if name == "rms_norm":
            return F.rms_norm(x, [10], weight, 1e-6)
        if name == "layer_norm":
            return F.layer_norm(x, [10], weight, bias)
        if name == "group_norm":
            return F.group_norm(x, *options, weight, bias)
        if name == "instance_norm":
            return F.instance_norm(x, weight=weight, bias=bias)
        return F.batch_norm(x, None, None, weight, bias, training=True)

    factors = [numbers(weight, seed=1), numbers(weight, seed=2)]
    return Case(
        [numbers((4, 6, 10)), *(factors[:1] if name == "rms_norm" else factors)],
        torchs,
        lambda grad, x, weight, bias=None: getattr(nn, f"{ours or name}_grad")(grad, x, *options, weight),
    )


async def _convolved(grad: Any, x: Any, weight: Any, bias: Any, **sizes: Any) -> list[Any]:
    return [
        await call.conv_input_grad(x.shape, weight, grad, **sizes),
        await call.conv_weight_grad(x, weight.shape, grad, **sizes),
        await call.conv_bias_grad(grad),
    ]


def convolution(dims: int, **sizes: Any) -> Case:
    return Case(
        [
            numbers((2, 4, *(7, 6, 5)[:dims])),
            numbers((6, 2, *(3, 2, 3)[:dims]), seed=1),
            numbers((6,), seed=2),
        ],
        lambda x, weight, bias: getattr(F, f"conv{dims}d")(x, weight, bias, **sizes),
        lambda *arrays: _convolved(*arrays, **sizes),
    )


async def _attended(grad: Any, query: Any, key: Any, value: Any, **options: Any) -> Any:
    made = await call.scaled_dot_product_attention(query, key, value, **options, return_lse=True)
    return await call.scaled_dot_product_attention_grad(
        grad, query, key, value, made.output, made.logsumexp, **options
    )


async def _linear(grad: Any, x: Any, weight: Any, _bias: Any) -> list[Any]:
    return [await call.linear_input_grad(grad, weight), *await call.linear_weight_grad(grad, x)]


def attention(mask: Array | None = None, keys: int = 4, **options: Any) -> Case:
    there = None if mask is None else torch.tensor(mask)
    return Case(
        [numbers((2, 4, 7, 8)), numbers((2, keys, 9, 8), seed=1), numbers((2, keys, 9, 5), seed=2)],
        lambda *arrays: F.scaled_dot_product_attention(*arrays, attn_mask=there, **options),
        lambda grad, *arrays: _attended(grad, *arrays, attn_mask=mask, **options),
    )


async def _most(grad: Any, x: Any, size: Any, stride: Any, padding: Any) -> Any:
    made = await nn.max_pool2d(x, size, stride, padding, return_indices=True)
    return await nn.max_pool_grad(grad, made.indices, x.shape)


def cases() -> dict[str, Case]:
    labels, weight = np.array([3, 0, 9, -100, 1, 3]), np.linspace(0.5, 2, 10)
    shares = np.random.default_rng(4).dirichlet(np.ones(10), 6)
    mask = np.where(np.arange(9) % 3 == 1, -np.inf, 0.5) * np.ones((7, 1))
    indices = np.array([[1, 4, 4], [0, 2, 1]])
    activations = {
        f"{name}-{'-'.join(options)}": Case(
            [smooth(name, (6, 10))],
            lambda x, name=name, options=options: getattr(F, NAMES.get(name, name))(
                x,
                **{
                    # A weight is an array to PyTorch, always.
                    {"axis": "dim"}.get(key, key): torch.tensor(value, dtype=x.dtype)
                    if key == "weight"
                    else value
                    for key, value in options.items()
                },
            ),
            lambda grad, x, name=name, options=options: getattr(nn, f"{name}_grad")(grad, x, **options),
        )
        for name, options in OPTIONS
    }
    losses = {
        f"{name}-{reduction}": loss(name, numbers((6, 10), seed=6), reduction=reduction)
        for name in ("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss")
        for reduction in ("mean", "none")
    }
    return {
        **activations,
        **{
            name: Case(
                [numbers((6, 10))],
                lambda x, name=name: getattr(torch, name)(x, 1),
                lambda grad, x, name=name: getattr(nn, f"{name}_grad")(grad, x, 1),
            )
            for name in ("softmax", "log_softmax")
        },
        **losses,
        "binary": loss(
            "binary_cross_entropy_with_logits",
            np.random.default_rng(5).uniform(size=(6, 10)),
            reduction="sum",
        ),
        "kl_div": loss("kl_div", shares, reduction="batchmean"),
        "cross_entropy": Case(
            [numbers((6, 10))],
            lambda x: F.cross_entropy(x, torch.tensor(labels), torch.tensor(weight), label_smoothing=0.1),
            lambda grad, x: nn.cross_entropy_grad(grad, x, labels, weight, label_smoothing=0.1),
        ),
        "layer_norm": norm("layer_norm"),
        "rms_norm": norm("rms_norm"),
        "group_norm": norm("group_norm", 3),
        "instance_norm": norm("instance_norm"),
        "batch_norm": norm("batch_norm", ours="batch_norm_training"),
        "conv1d": convolution(1, stride=2, padding=1, groups=2),
        "conv2d": convolution(2, stride=(1, 2), padding=(1, 0), dilation=(2, 1), groups=2),
        "conv3d": convolution(3, padding=1, groups=2),
        "avg_pool2d": Case(
            [numbers((2, 3, 7, 6))],
            lambda x: F.avg_pool2d(x, (3, 2), 2, 1, ceil_mode=True, count_include_pad=False),
            lambda grad, x: nn.avg_pool_grad(grad, x.shape, (3, 2), 2, 1, True, False),
        ),
        "max_pool2d": Case(
            [numbers((2, 3, 7, 6))],
            lambda x: F.max_pool2d(x, (3, 2), 2, 1),
            lambda grad, x: _most(grad, x, (3, 2), 2, 1),
        ),
        "adaptive_avg_pool2d": Case(
            [numbers((2, 3, 7, 6))],
            lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
            lambda grad, x: nn.adaptive_avg_pool_grad(grad, x.shape),
        ),
        "attention": attention(),
        "attention-causal": attention(is_causal=True, keys=2, enable_gqa=True, scale=0.3),
        "attention-masked": attention(mask),
        "linear": Case(
            [numbers((4, 3, 6)), numbers((9, 6), seed=1), numbers((9,), seed=2)], F.linear, _linear
        ),
        "embedding": Case(
            [numbers((5, 8))],
            lambda weight: F.embedding(torch.tensor(indices), weight, padding_idx=2),
            lambda grad, weight: nn.embedding_grad(grad, indices, 5, padding_idx=2),
        ),
    }


CASES = cases()


@pytest.mark.parametrize("name", CASES)
async def test_gradients(device: ta.Device, name: str) -> None:
    case = CASES[name]
    grad, wanted = slopes(case)
    found = await case.ours(await device.put(grad), *[await device.put(array) for array in case.arrays])
    for one, want in zip([found] if isinstance(found, ta.AccelRef) else found, wanted, strict=True):
        got = await one.to_host()
        assert got.dtype == np.float64
        # PyTorch's factor of a sixth there is float32's, also for float64.
        rtol = 1e-7 if name == "hardsigmoid-" else 1e-9
        np.testing.assert_allclose(got.reshape(want.shape), want, rtol=rtol, atol=1e-10)


STEPS: dict[str, tuple[dict[str, Any], int]] = {
    "sgd": ({"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.02}, 1),
    "adam": ({"lr": 0.05, "betas": (0.8, 0.99), "weight_decay": 0.02}, 2),
    "adamw": ({"lr": 0.05, "betas": (0.8, 0.99), "weight_decay": 0.1}, 2),
}


@pytest.mark.parametrize("name", STEPS)
async def test_steps_of_optimizers(device: ta.Device, name: str) -> None:
    options, states = STEPS[name]
    param = torch.tensor(numbers((6, 10)), requires_grad=True)
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](
        [param], **options
    )
    ours = await device.put(numbers((6, 10)))
    state = [await device.zeros((6, 10), "float64") for _ in range(states)]
    for step in range(1, 5):
        grad = numbers((6, 10), seed=step)
        param.grad = torch.tensor(grad)
        optimizer.step()
        last = {"is_first": step == 1} if name == "sgd" else {"step": step}
        await getattr(nn, name)(ours, await device.put(grad), *state, **last, **options)
        np.testing.assert_allclose(await ours.to_host(), param.detach().numpy(), rtol=1e-11, atol=1e-12)
