"""Operators of Python, and the functions that make calls of them."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np

from ..base._refusals import OnDevice

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
# Types of arrays and of elements. A reference is unequal to all else, as any object is.
_EQUALITY = ("equal", "not_equal")
_REFUSED = (type(None), str, bytes)
_COMPARED = (OnDevice, np.ndarray, np.generic, Number, list, tuple)
OF_UFUNCS = {"power": "pow", "left_shift": "bitwise_left_shift", "right_shift": "bitwise_right_shift"}
_OF_ONE = {"neg": "negative", "pos": "positive", "abs": "abs", "invert": "bitwise_invert"}

NAMESPACE: list[Any] = []
"""The namespace of the standard over calls: the layers above add it."""


def give_operators(cls: type[OnDevice], find: Callable[[str], Callable[..., Any]]) -> None:
    """Give a class the operators of Python.

    Args:
        cls: The class.
        find: Returns the function of a name, such as ``add``, once it is needed.
    """

    def of_two(name: str, *, is_reflected: bool) -> Callable[[Any, Any], Any]:
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
            return find(name)(operand, self) if is_reflected else find(name)(self, operand)

        return ask

    def of_one(name: str) -> Callable[[Any], Any]:
        return lambda self: find(name)(self)  # noqa: PLW0108  # it is not found before it is needed

    for special, name in OF_TWO.items():
        setattr(cls, f"__{special}__", of_two(name, is_reflected=False))
        if special not in _ORDER:
            setattr(cls, f"__r{special}__", of_two(name, is_reflected=True))
    for special, name in _OF_ONE.items():
        setattr(cls, f"__{special}__", of_one(name))
