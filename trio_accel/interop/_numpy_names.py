"""NumPy's functions for arrays in a blocking namespace: on the device if it has them, else on the host."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

_NAMESAKES = {
    **{f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    "absolute": "abs",
    "amax": "max",
    "amin": "min",
    "arctan2": "atan2",
    "concatenate": "concat",
    "conjugate": "conj",
    "fabs": "abs",
    "invert": "bitwise_invert",
    "left_shift": "bitwise_left_shift",
    "mod": "remainder",
    "power": "pow",
    "right_shift": "bitwise_right_shift",
    "rint": "round",
    "true_divide": "divide",
}
"""The namespace's name of functions that NumPy names otherwise."""
_COMMON = frozenset(
    (
        *("all", "any", "argmax", "argmin", "broadcast_to", "clip", "concat", "count_nonzero", "cross"),
        *("cumulative_prod", "cumulative_sum", "diff", "expand_dims", "flip", "imag", "isin", "matmul"),
        *("matrix_transpose", "max", "mean", "min", "moveaxis", "outer", "permute_dims", "prod", "real"),
        *("reshape", "roll", "squeeze", "stack", "std", "sum", "tensordot", "tile", "tril", "triu"),
        *("var", "vecdot", "where"),
    )
)
"""Functions without ufuncs that mean the same with the arguments that both have."""
_OF_LAYOUT = ("ndim", "shape", "size")


def of_function(space: Any, function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Call a NumPy function with arrays of a namespace among its arguments."""
    own_name: str = function.__name__
    name = _NAMESAKES.get(own_name, own_name)
    package = function.__module__.partition(".")[2]
    if name in _OF_LAYOUT and len(args) == 1 and not named:
        return getattr(args[0], name)
    namespace: Any = space
    if package in ("linalg", "fft"):
        namespace = getattr(space, package)
    elif name not in _COMMON:
        namespace = None
    counterpart: Any = getattr(namespace, name, None) if namespace is not None else None
    if counterpart is not None and _fits(counterpart, args, named):
        return counterpart(*args, **named)
    return function(*_on_host(space, args), **_on_host(space, named))


def of_ufunc(space: Any, ufunc: Any, method: str, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Call a ufunc, or a method of one, with arrays of a namespace among its arguments."""
    outputs = named.get("out", ())
    own_name: str = ufunc.__name__
    name = _NAMESAKES.get(own_name, own_name)
    counterpart: Any = getattr(space, name, None) if method == "__call__" else None
    if counterpart is not None and not named:
        return counterpart(*inputs)
    if not any(isinstance(output, space.array_type) for output in outputs):
        return getattr(ufunc, method)(*_on_host(space, inputs), **_on_host(space, named))
    rest = {key: value for key, value in named.items() if key != "out"}
    results = of_ufunc(space, ufunc, method, inputs, rest)
    for output, result in zip(outputs, results if len(outputs) > 1 else (results,), strict=True):
        if output is not None:
            output[...] = result
    return outputs if len(outputs) > 1 else outputs[0]


def _fits(function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*args, **named)
    except TypeError:
        return False
    return True


def _on_host(space: Any, value: Any) -> Any:
    """Copy the arrays of the namespace to the host, in tuples, lists and dicts."""
    if isinstance(value, space.array_type):
        return value.__array__()
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value)
        return {key: _on_host(space, item) for key, item in items.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_host(space, item) for item in value)
    return value
