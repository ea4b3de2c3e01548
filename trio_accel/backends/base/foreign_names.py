"""Names of NumPy and PyTorch that are not there, and what to write in their place."""

from __future__ import annotations

__all__ = ["instead_of"]

_INSTEAD: dict[str, str] = {
    "open_device": 'async with ta.open_system("name") as system, system.open_device("cpu") as device',
    **dict.fromkeys(("array", "asarray", "tensor"), "await device.put(array)"),
    "zeros": "await device.zeros(shape, dtype)",
    # Of arrays x.
    "astype": "await x.cast(dtype)",
    **dict.fromkeys(("cpu", "get", "numpy", "tolist"), "await x.to_host()"),
    **dict.fromkeys(("dot", "matmul"), "await ta.linalg.matmul(x, y)"),
    **dict.fromkeys(("flatten", "ravel", "view"), "x.reshape(-1)"),
    "to": "await x.cast(dtype), or await x.copy_to(device)",
    "transpose": "x.T",
    **{
        name: f"await ta.arrays.{name}(x, axis=...)"
        for name in ("all", "any", "max", "mean", "min", "prod", "softmax", "std", "sum", "var")
    },
    "average": "await ta.arrays.mean(x, axis=...)",
    "ln": "log(x)",
    "norm": 'await ta.jit.reduction("abs(x) ** 2", "sum", post="sqrt(a)")(x)',
    "exp": 'await ta.jit.elementwise("exp(x)")(x)',
    "relu": "await ta.nn.relu(x)",
    "sigmoid": "await ta.nn.sigmoid(x)",
}


def instead_of(name: str) -> str:
    """What to write in place of a name, as the end of a message; empty where that is not known."""
    return f"; write {_INSTEAD[name]}" if name in _INSTEAD else ""
