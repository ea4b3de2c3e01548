"""Names of NumPy and PyTorch that are not there under these names, and what to write in their place."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ATTRIBUTES", "EXPRESSIONS", "MADE", "REDUCTIONS"]

ATTRIBUTES: Mapping[str, str] = {
    **dict.fromkeys(("astype", "type"), "await x.cast(dtype)"),
    **dict.fromkeys(("asnumpy", "cpu", "get", "numpy", "tolist"), "await x.to_host()"),
    **dict.fromkeys(("dot", "matmul", "mm"), "await ta.linalg.matmul(x, y)"),
    **dict.fromkeys(("flatten", "ravel", "view"), "x.reshape(-1), a view"),
    **dict.fromkeys(("permute", "swapaxes", "t", "transpose"), "x.T, a view with the axes in opposite order"),
    "clone": "await x.copy()",
    "squeeze": "x[0], a view without the first axis",
    "sum": "await ta.arrays.sum(x, axis=...)",
    "to": "await x.cast(dtype), or await x.copy_to(device)",
    "unsqueeze": "x[None], a view with one axis more",
}
"""Of arrays ``x``."""

MADE: Mapping[str, str] = {
    **dict.fromkeys(("array", "asarray", "from_numpy", "tensor"), "await device.put(array)"),
    **{name: f"await device.{name}(shape, dtype)" for name in ("empty", "zeros")},
    "full": "await device.full(shape, value, dtype)",
    "ones": "await device.full(shape, 1, dtype)",
}
"""Functions that make arrays."""

_PLAIN_REDUCTIONS = {
    **{name: name for name in ("all", "any", "argmax", "argmin", "max", "min", "prod", "sum")},
    "add": "sum",
    "amax": "max",
    "amin": "min",
    "maximum": "max",
    "minimum": "min",
    "multiply": "prod",
}
_MEAN = 'reduction("x", "sum", post="a / n")'
REDUCTIONS: Mapping[str, str] = {
    **{name: f'reduction("x", "{called}")' for name, called in _PLAIN_REDUCTIONS.items()},
    **dict.fromkeys(("average", "mean"), _MEAN),
    "norm": 'reduction("abs(x) ** 2", "sum", post="sqrt(a)")',
    "std": f'reduction("(x - mean) ** 2", "sum", post="sqrt(a / n)") with mean of {_MEAN}',
    "var": f'reduction("(x - mean) ** 2", "sum", post="a / n") with mean of {_MEAN}',
}
"""Functions of `trio_accel.jit` that make one value of many."""

EXPRESSIONS: Mapping[str, str] = {
    "clip": "clip(x, low, high)",
    "gelu": "0.5 * x * (1 + tanh(0.7978845608 * (x + 0.044715 * x ** 3)))",
    "imag": "imag(x)",
    "leaky_relu": "where(x > 0, x, 0.01 * x)",
    "ln": "log(x)",
    "max": "maximum(a, b)",
    "min": "minimum(a, b)",
    "real": "real(x)",
    "relu": "maximum(x, 0)",
    "round": "rint(x)",
    "rsqrt": "1 / sqrt(x)",
    "sigmoid": "1 / (1 + exp(-x))",
    "silu": "x / (1 + exp(-x))",
    "softmax": (
        'exp(x - top) / total, with top of reduction("x", "max") and total of '
        'reduction("exp(x - top)", "sum"), both called with axis=-1, keepdims=True'
    ),
    "softplus": "log1p(exp(x))",
}
"""Expressions that say the same element by element."""
