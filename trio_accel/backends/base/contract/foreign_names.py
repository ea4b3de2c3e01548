"""Names of NumPy and PyTorch that do not exist here, and what to write instead."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

_ROOT = __name__.partition(".")[0]

# Packages with functions of arrays, in the order in which a name is looked for.
_CAPABILITIES = ("arrays", "linalg", "fft", "nn")

_INSTEAD: dict[str, str] = {
    "open_device": 'async with ta.open_system("name") as system, system.open_device("cpu") as device',
    **dict.fromkeys(("array", "asarray", "tensor"), "await device.put(array)"),
    "zeros": "await device.zeros(shape, dtype)",
    # Methods of an array x.
    "astype": "await x.cast(dtype)",
    **dict.fromkeys(("cpu", "get", "numpy", "tolist"), "await x.to_host()"),
    **dict.fromkeys(("dot", "matmul"), "await (x @ y)"),
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


OTHER_NAMES: dict[str, str] = {
    **{f"arc{name}": f"arrays.a{name}" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    "absolute": "arrays.abs", "amax": "arrays.max", "amin": "arrays.min", "arctan2": "arrays.atan2",
    **dict.fromkeys(("argpartition", "topk"), "arrays.top_k"),
    **dict.fromkeys(("bitwise_not", "invert"), "arrays.bitwise_invert"),
    **dict.fromkeys(("cat", "concatenate", "hstack", "vstack"), "arrays.concat"), "clamp": "arrays.clip",
    "conjugate": "arrays.conj", **{f"cum{name}": f"arrays.cumulative_{name}" for name in ("sum", "prod")},
    "gather": "arrays.take_along_axis", "index_select": "arrays.take", "inner": "linalg.vecdot",
    "left_shift": "arrays.bitwise_left_shift", "mod": "arrays.remainder", "mm": "linalg.matmul",
    "norm": "linalg.vector_norm, or ta.linalg.matrix_norm", "power": "arrays.pow",
    "right_shift": "arrays.bitwise_right_shift", "scatter_add": 'arrays.scatter with reduce="add"',
    **dict.fromkeys(("swapaxes", "permute"), "arrays.permute_dims"), "true_divide": "arrays.divide",
    "unique": "arrays.unique_values", "fabs": "arrays.abs", "rint": "arrays.round", "around": "arrays.round",
    "ravel": "arrays.reshape", "rollaxis": "arrays.moveaxis", "inverse": "linalg.inv",
    # Methods of ufuncs.
    "add.reduce": "arrays.sum", "multiply.reduce": "arrays.prod", "maximum.reduce": "arrays.max",
    "minimum.reduce": "arrays.min", "logical_and.reduce": "arrays.all", "logical_or.reduce": "arrays.any",
    "add.accumulate": "arrays.cumulative_sum", "multiply.accumulate": "arrays.cumulative_prod",
    "maximum.accumulate": "arrays.cumulative_max", "minimum.accumulate": "arrays.cumulative_min",
    "multiply.outer": "linalg.outer",
}  # fmt: skip
"""Of names of NumPy and PyTorch that have others here: the package and name."""


def instead_of(name: str) -> str:
    """Return the end of a message with the counterpart of a name; empty without a counterpart."""
    return f"; write {_INSTEAD[name]}" if name in _INSTEAD else ""


def elsewhere(name: str) -> str:
    """Return where a name is that a package lacks, as the end of a message; empty if that is not known."""
    for package in _CAPABILITIES:
        module = sys.modules.get(f"{_ROOT}.{package}")
        if module is not None and name in module.__all__:
            return f"; write ta.{package}.{name}"
    return f"; write ta.{OTHER_NAMES[name]}" if name in OTHER_NAMES else instead_of(name)


def counterpart(package: str, name: str, array: str) -> str:
    """Return what to write instead of a NumPy function that got an array of a device.

    Args:
        package: The part of NumPy with the function, such as ``"linalg"``; empty for NumPy itself.
        name: The function, such as ``"sin"``; or the method of a ufunc, such as ``"add.reduce"``.
        array: The message's name for the array.
    """
    modules = {
        capability: import_module(f"{_ROOT}.{capability}")
        for capability in (package, *_CAPABILITIES)
        if capability in _CAPABILITIES
    }
    matches = [f"{capability}.{name}" for capability, module in modules.items() if name in module.__all__]
    namespace, _, function = (*matches, OTHER_NAMES.get(name, ""))[0].partition(".")
    operation = getattr(modules.get(namespace), function, None)
    if operation is None:
        advice = f"write ta.{namespace}.{function}" if namespace else instead_of(name)[2:]
        path = ".".join(filter(None, ("np", package, name)))
        return advice or f"it computes on the host alone: {path}(await {array}.to_host())"
    needed = [
        "*" * (parameter.kind is parameter.VAR_POSITIONAL) + parameter.name
        for parameter in inspect.signature(operation).parameters.values()
        if parameter.default is parameter.empty
    ]
    return f"write {'await ' * hasattr(operation, 'asked')}ta.{namespace}.{function}({', '.join(needed)})"


def _misspelt(package: str, name: str) -> str:
    """Return the name of the package that differs in a letter or an underscore."""
    names: list[str] = sys.modules[package].__all__
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def tells_of_missing(package: str) -> Callable[[str], NoReturn]:
    """Make the ``__getattr__`` for a package of operations, which raises with a missing name's place.

    Type checkers must not see it, because they would take every name for an existing one.
    """

    def missing(name: str) -> NoReturn:
        advice = "" if name.startswith("_") else elsewhere(name) or _misspelt(package, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}{advice}")

    return missing
