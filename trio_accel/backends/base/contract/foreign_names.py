"""Names of NumPy and PyTorch that do not exist here, and what to write instead."""

from __future__ import annotations

import difflib
import inspect
import re
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


_GRADIENTS = "write await ta.grad(loss)(x), where loss is a function that composes calls"
_NO_GRADIENTS = (
    "leave it out, because nothing is recorded outside of ta.grad; ta.stop_gradient(x) works inside"
)

OF_PACKAGE: dict[str, str] = {
    "vectorize": "write ta.vmap(function)",
    **dict.fromkeys(
        ("jacobian", "jacfwd", "jacrev"),
        "write ta.gradients.jacobian",
    ),
    "hessian": "write ta.gradients.hessian",
    "hvp": "write ta.gradients.hvp",
    **dict.fromkeys(("jvp", "linearize"), "write await ta.gradients.jvp(function, (x,), (v,))"),
    **dict.fromkeys(("custom_vjp", "custom_jvp"), "write ta.custom_gradient"),
    **dict.fromkeys(
        ("no_grad", "enable_grad", "inference_mode", "set_grad_enabled"),
        "leave it out, because nothing is recorded outside of ta.grad",
    ),
    **dict.fromkeys(("autograd", "backward"), _GRADIENTS),
    **dict.fromkeys(("compile", "make_jaxpr"), "write ta.step(function)"),
    **dict.fromkeys(("pmap", "shard_map", "distributed"), "write ta.open_world(devices) for several devices"),
    **dict.fromkeys(
        ("Tensor", "Array", "ndarray"),
        "write await device.put(array) for an array, and ta.AccelRef for its type",
    ),
    **dict.fromkeys(
        ("cuda", "gpu", "cpu", "device", "default_device", "set_default_device"),
        'write system.open_device("cuda"), or ta.blocking("cuda") in code that blocks',
    ),
    **dict.fromkeys(("as_tensor", "device_put", "from_numpy", "frombuffer"), "write await device.put(array)"),
    **dict.fromkeys(("asnumpy", "device_get", "to_numpy"), "write await x.to_host()"),
    "optim": "write ta.train.adamw, or another optimizer of ta.train or ta.nn",
    **dict.fromkeys(
        ("PRNGKey", "default_rng", "key", "manual_seed", "rand", "randint", "randn", "seed"),
        "write ta.random.Generator(device, seed=1), and draw by its methods",
    ),
    **dict.fromkeys(
        ("block_until_ready", "synchronize"),
        "an awaited call has ended; await device.synchronize() waits for all work of a device",
    ),
    **dict.fromkeys(("lax", "numpy"), "write ta.arrays, ta.linalg, or ta.jit.elementwise"),
    "DataLoader": "write ta.stream(device, batches)",
    **{
        name: f"write '{name}', or ta.DType.{name}"
        for name in (
            *("bfloat16", "complex64", "complex128", "float16", "float32", "float64"),
            *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        )
    },
}
"""The advice for names of JAX, NumPy and PyTorch that the package itself lacks."""

OF_ARRAYS: dict[str, str] = {
    **dict.fromkeys(("backward", "grad", "grad_fn", "requires_grad", "requires_grad_"), _GRADIENTS),
    **dict.fromkeys(("detach", "detach_"), _NO_GRADIENTS),
    **dict.fromkeys(
        ("block_until_ready", "synchronize", "is_ready"),
        "an awaited call has ended; await device.synchronize() waits for all work of a device",
    ),
    **dict.fromkeys(("cuda", "to_device"), "write await x.copy_to(device)"),
    **dict.fromkeys(("clone", "contiguous"), "write await x.copy()"),
    **dict.fromkeys(("asnumpy", "data", "device_buffer"), "write await x.to_host()"),
    **dict.fromkeys(("unsqueeze", "newaxis"), "write x[None], or ta.arrays.expand_dims(x, axis=...)"),
    **dict.fromkeys(("expand", "expand_as"), "write ta.arrays.broadcast_to(x, shape)"),
    "view_as": "write x.reshape(y.shape)",
    **dict.fromkeys(("permute", "swapaxes"), "write x.transpose(axes)"),
    **dict.fromkeys(("dim", "ndimension"), "write x.ndim"),
    "numel": "write x.size",
    **dict.fromkeys(("element_size", "itemsize"), "write x.dtype.itemsize"),
    "stride": "write x.strides",
    **dict.fromkeys(("type", "to_dtype"), "write await x.cast(dtype)"),
    **{
        name: f"write await x.cast({dtype!r})"
        for name, dtype in {
            "double": "float64",
            "float": "float32",
            "half": "float16",
            "bfloat16": "bfloat16",
            "long": "int64",
            "int": "int32",
            "short": "int16",
            "byte": "uint8",
            "bool": "bool",
        }.items()
    },
    **dict.fromkeys(("mm", "mv", "bmm"), "write await (x @ y)"),
    **{
        f"{name}_": f"write await x.assign(x {sign} y)"
        for name, sign in {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}.items()
    },
    "zero_": "write await x.fill(0)",
    "fill_": "write await x.fill(value)",
    "copy_": "write await x.assign(y)",
}
"""The advice for attributes that arrays of other libraries have."""


def instead_of(name: str) -> str:
    """Return the end of a message with the counterpart of a name; empty without a counterpart."""
    return f"; write {_INSTEAD[name]}" if name in _INSTEAD else ""


def instead_of_attribute(name: str) -> str:
    """Return the end of a message with the counterpart of an array's attribute, or an empty text."""
    if name in OF_ARRAYS:
        return f"; {OF_ARRAYS[name]}"
    return instead_of(name) or (f"; {advice}" if (advice := _written("", name)) else "")


def elsewhere_than_here(name: str) -> str:
    """Return the end of a message for a name that the package itself lacks; empty if that is not known."""
    return f"; {OF_PACKAGE[name]}" if name in OF_PACKAGE else elsewhere(name)


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
    path = ".".join(filter(None, ("np", package, name)))
    advice = _written(package, name) or instead_of(name)[2:]
    return advice or f"it computes on the host alone: {path}(await {array}.to_host())"


def _written(package: str, name: str) -> str:
    """Return the call of the function with a name, or with its name here; empty if there is none."""
    modules = {
        capability: import_module(f"{_ROOT}.{capability}")
        for capability in (package, *_CAPABILITIES)
        if capability in _CAPABILITIES
    }
    matches = [f"{capability}.{name}" for capability, module in modules.items() if name in module.__all__]
    namespace, _, function = (*matches, OTHER_NAMES.get(name, ""))[0].partition(".")
    operation = getattr(modules.get(namespace), function, None)
    if operation is None:
        return f"write ta.{namespace}.{function}" if namespace else ""
    needed = [
        "*" * (parameter.kind is parameter.VAR_POSITIONAL) + parameter.name
        for parameter in inspect.signature(operation).parameters.values()
        if parameter.default is parameter.empty
    ]
    return f"write {'await ' * hasattr(operation, 'asked')}ta.{namespace}.{function}({', '.join(needed)})"


def _instead_of_layer(name: str) -> str:
    """Return the end of a message with the function of a layer, such as of ``"BatchNorm2d"``."""
    if name in ("functional", "init"):
        return "; ta.nn has the functions itself: write ta.nn.relu(x)"
    if not name[:1].isupper():
        return ""
    for capability in ("nn", "arrays"):
        functions = {
            function.replace("_", ""): function
            for function in sys.modules[f"{_ROOT}.{capability}"].__all__
            if function.islower()
        }
        lowered = name.lower()
        for candidate in (lowered, lowered.removesuffix("loss"), re.sub(r"(?<=[a-z])\dd$", "", lowered)):
            if candidate in functions:
                return f"; layers are not available: write ta.{capability}.{functions[candidate]} on arrays"
    return "; layers are not available: write a function of arrays, or a ta.train.Module"


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
        advice = "" if name.startswith("_") else elsewhere(name)
        if not advice and package == f"{_ROOT}.nn":
            advice = _instead_of_layer(name)
        advice = advice or _misspelt(package, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}{advice}")

    return missing
