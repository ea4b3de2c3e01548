"""Operators of Python, and the functions that make calls of them."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np

from ...actors import silence
from ..base._refusals import OnDevice, shown
from ._chain import ChainStep, host_use

_ORDER = {
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}
OF_TWO = _ORDER | {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "matmul": "matmul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}
# Types of arrays and elements. A reference is unequal to all else, as any object is.
_EQUALITY = ("equal", "not_equal")
_REFUSED = (type(None), str, bytes)
_COMPARED = (OnDevice, np.ndarray, np.generic, Number, list, tuple)
OF_UFUNCS = {"power": "pow", "left_shift": "bitwise_left_shift", "right_shift": "bitwise_right_shift"}
_OF_ONE = {"neg": "negative", "pos": "positive", "abs": "abs", "invert": "bitwise_invert"}

_SIGNS = {
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "matmul": "@",
    "and": "&",
    "or": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
    "neg": "-",
    "pos": "+",
    "invert": "~",
}

NAMESPACE: list[Any] = []
"""The namespace of the standard over calls: the layers above add it."""


def give_operators(cls: type[OnDevice], find: Callable[[str], Callable[..., Any]]) -> None:
    """Give a class the operators of Python.

    Args:
        cls: The class.
        find: Returns the function of a name, such as ``add``, once it is needed.
    """
    for special, name in OF_TWO.items():
        setattr(cls, f"__{special}__", _of_two(find, special, name, is_reflected=False))
        if special not in _ORDER:
            setattr(cls, f"__r{special}__", _of_two(find, special, name, is_reflected=True))
    for special, name in _OF_ONE.items():
        setattr(cls, f"__{special}__", _of_one(find, special, name))


def _of_two(
    find: Callable[[str], Callable[..., Any]], special: str, name: str, *, is_reflected: bool
) -> Callable[[Any, Any], Any]:
    def ask(self: Any, operand: object) -> Any:
        if name in _EQUALITY:
            if not isinstance(operand, _COMPARED):
                return NotImplemented
        elif (
            isinstance(operand, _REFUSED)
            or getattr(operand, "__array_ufunc__", 0) is None
            or getattr(type(operand), "takes_operators", False)
        ):
            self.silence()  # Python refuses it, or asks the operand, as NumPy has it
            return NotImplemented
        if isinstance(self, ChainStep) and self.function.result_on_host:
            refuse_hosts(special, self, operand, is_reflected=is_reflected)
        return find(name)(operand, self) if is_reflected else find(name)(self, operand)

    return ask


def _of_one(find: Callable[[str], Callable[..., Any]], special: str, name: str) -> Callable[[Any], Any]:
    def ask(self: Any) -> Any:
        if isinstance(self, ChainStep) and self.function.result_on_host:
            refuse_hosts(special, self)
        return find(name)(self)

    return ask


def refuse_hosts(special: str, call: Any, *operand: Any, is_reflected: bool = False) -> None:
    """Refuse an operator of a call with a result on the host, unless the other operand is on a device.

    Args:
        special: The operator, such as ``add``.
        call: The call.
        operand: The other operand, if any.
        is_reflected: Whether the call is the second operand.

    Raises:
        TypeError: Neither operand is on a device.
    """
    if any(isinstance(x, OnDevice) and not host_use(x) for x in operand):
        return
    silence(*operand)
    parts = [host_use(x) or (shown(x) if isinstance(x, Number) else "...") for x in (call, *operand)]
    if special in _SIGNS:
        sign = _SIGNS[special]
        expression = (
            f" {sign} ".join(reversed(parts) if is_reflected else parts) if operand else sign + parts[0]
        )
    else:
        expression = f"{special}({parts[0]})"
    call.refuse(f"{call.function.result_on_host}; await it first: {expression}")
