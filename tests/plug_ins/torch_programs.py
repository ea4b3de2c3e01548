"""A program of PyTorch's, which workers import."""

from __future__ import annotations

from typing import Any

import torch

from trio_accel.programs import Array, method


class Network:
    """Two layers, and a gradient."""

    def __init__(self, first: Array, second: Array) -> None:
        self._first, self._second = (torch.from_dlpack(one) for one in (first, second))

    @method(out=lambda x: ((x.shape[0], 3), x.dtype))
    def forward(self, x: Array) -> Any:
        return torch.relu(torch.from_dlpack(x) @ self._first) @ self._second

    def gradient(self, x: Array) -> Any:
        given = torch.from_dlpack(x).clone().requires_grad_()
        (given**3).sum().backward()
        return given.grad
