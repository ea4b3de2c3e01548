"""PyTorch's names of layers: some are messages here, and the others are not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trio_accel as ta

nn: Any = ta.nn
LAYERS = [
    name
    for name in ta.nn.__all__
    if name.startswith(("Linear", "Conv", "MaxPool", "AvgPool", "Adaptive"))
    and not name.endswith(("Grad", "Grads", "Result"))
]


@pytest.mark.parametrize("name", LAYERS)
def test_a_message_with_the_name_of_a_layer_refuses_its_arguments(name: str) -> None:
    assert len(LAYERS) >= 9
    for args, named in (((3, 4), {}), ((3, 4, 5), {}), ((), {"in_channels": 3}), ((2,), {})):
        with pytest.raises(
            TypeError, match=rf"^nn\.{name}: .* layers are not available: write await ta\.nn\."
        ):
            getattr(nn, name)(*args, **named)


async def test_messages_with_arrays_are_made(device: ta.Device) -> None:
    x = await device.put(np.eye(2))
    y = await device.ask(ta.nn.Linear(x, x))
    np.testing.assert_array_equal(await y.to_host(), np.eye(2))
    with pytest.raises(TypeError, match=r"^nn\.linear: x must be an AccelRef or a NumPy array, got 3"):
        await nn.linear(3, x)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ReLU", "ta.nn.relu"),
        ("GELU", "ta.nn.gelu"),
        ("MSELoss", "ta.nn.mse_loss"),
        ("CrossEntropyLoss", "ta.nn.cross_entropy"),
        ("BatchNorm2d", "ta.nn.batch_norm"),
        ("LayerNorm", "ta.arrays.layer_norm"),
        ("Dropout", "ta.nn.dropout"),
        ("Softmax", "ta.arrays.softmax"),
        ("Sequential", "ta.train.Module"),
        ("Module", "ta.train.Module"),
        ("functional", "ta.nn.relu"),
    ],
)
def test_a_missing_layer_names_the_function(name: str, told: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; .*{told}"):
        getattr(nn, name)
