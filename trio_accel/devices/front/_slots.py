"""Placeholders for the arguments of a step while its function is called: for host arrays and numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import attrs
import numpy as np

from ...backends.base import DType, HostArray
from ..operations._ref import AccelRef
from ._layout import map_tree
from ._recorder import ChainRecorder


@attrs.define(eq=False)
class TracedNumbers:
    """The numbers of a traced call. Slots share them, so that a cached slot does not keep arrays alive.

    Attributes:
        values: The values of the slots, in order.
        is_by_value: Whether a layout depends on the value of a number.
        is_refused: Whether a slot has refused to reveal its value.
    """

    values: list[float] = attrs.field(factory=list[float])
    is_by_value: bool = False
    is_refused: bool = False


class Slot:
    """A step's number during tracing. Its value may differ at each call.

    Arithmetic with other numbers makes a slot with a value that Python computes at each call.

    Args:
        step: The name of the step.
        name: The name of the parameter.
        compute: Computes the number from all numbers of a call.
        traced: The numbers of the traced call.
    """

    __slots__ = ("_name", "_step", "_traced", "compute")

    def __init__(
        self, step: str, name: str, compute: Callable[[Sequence[float]], float], traced: TracedNumbers
    ) -> None:
        self._step = step
        self._name = name
        self._traced = traced
        self.compute = compute

    def __repr__(self) -> str:
        return f"<number {self._name} of step {self._step}>"

    def value_for_layout(self) -> float:
        """Return the value in the traced call, and make the values of all numbers part of the structure."""
        self._traced.is_by_value = True
        return self.compute(self._traced.values)

    def refuse(self, *_: object) -> NoReturn:
        """Refuse a use that needs the value.

        Raises:
            TypeError: Always.
        """
        self._traced.is_refused = True
        raise TypeError(
            f"step {self._step}: the value of {self._name} is not known while the step is traced, because "
            f"the number may differ at each call; name it, ta.step(static={self._name!r}), to trace each "
            "value, or compute with it before the step"
        )

    __bool__ = __float__ = __int__ = __index__ = __complex__ = __round__ = __trunc__ = refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = refuse
    # A table or set would not find the number, and Python would continue with the default.
    __hash__ = refuse

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **named: Any) -> Any:
        """Accept the arithmetic of NumPy's own floats, and refuse arrays and other functions.

        Raises:
            TypeError: It is another function.
        """
        name = _OF_UFUNCS.get(ufunc.__name__)
        if name is None or method != "__call__" or named:
            self.refuse()
        first, second = inputs
        is_reflected = first is not self
        operand = first if is_reflected else second
        result = self.combined(getattr(operator, name), operand, is_reflected=is_reflected)
        return self.refuse() if result is NotImplemented else result

    def combined(self, function: Callable[..., float], *operands: object, is_reflected: bool = False) -> Any:
        """Return the slot for a function of this number and others; NotImplemented for other operands."""
        if not all(isinstance(operand, (int, float, Slot)) for operand in operands):
            # An array's own operator accepts the slot.
            return NotImplemented
        parts = [self, *operands][:: -1 if is_reflected else 1]

        def compute(numbers: Sequence[float]) -> float:
            return function(*[part.compute(numbers) if isinstance(part, Slot) else part for part in parts])

        return Slot(self._step, self._name, compute, self._traced)


def _have_arithmetic() -> None:
    def of_two(function: Callable[..., float], *, is_reflected: bool) -> Callable[[Slot, object], Any]:
        return lambda self, operand: self.combined(function, operand, is_reflected=is_reflected)

    def of_one(function: Callable[..., float]) -> Callable[[Slot], Any]:
        return lambda self: self.combined(function)

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        function = getattr(operator, name)
        setattr(Slot, f"__{name}__", of_two(function, is_reflected=False))
        setattr(Slot, f"__r{name}__", of_two(function, is_reflected=True))
    for name in ("neg", "pos", "abs"):
        setattr(Slot, f"__{name}__", of_one(getattr(operator, name)))


# The functions of `operator` by NumPy's names.
_OF_UFUNCS = {
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "truediv",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "power": "pow",
}
_have_arithmetic()


class StandIns:
    """The placeholders of a step's arguments while its function is called.

    Args:
        step: The name of the step.
        static: The names and positions of parameters with values in the structure.
        recorder: Records the operations.
        has_slots: Whether slots replace numbers.

    Attributes:
        hosts: The placeholders of host arrays, in order.
        numbers: The numbers of slots.
    """

    def __init__(
        self, step: str, static: frozenset[int | str], recorder: ChainRecorder, *, has_slots: bool
    ) -> None:
        self._step = step
        self._static = static
        self._recorder = recorder
        self._has_slots = has_slots
        self.hosts: list[AccelRef] = []
        self.numbers: TracedNumbers = TracedNumbers()

    def of(
        self, args: tuple[Any, ...], named: Mapping[str, Any], parameters: Mapping[str, object]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with placeholders for host arrays and numbers."""
        names = [*list(parameters)[: len(args)], *[""] * (len(args) - len(parameters))]
        return (
            tuple(
                [
                    self._replace(argument, name, index)
                    for index, (argument, name) in enumerate(zip(args, names, strict=True))
                ]
            ),
            {name: self._replace(argument, name, name) for name, argument in named.items()},
        )

    def _replace(self, argument: Any, name: str, parameter: int | str) -> Any:
        is_static = parameter in self._static

        def replace_leaf(leaf: Any) -> Any:
            if type(leaf) is np.ndarray:
                host: HostArray = cast("Any", leaf)
                self.hosts.append(self._recorder.stand_in_for(host.shape, DType.of(host.dtype)))
                return self.hosts[-1]
            if type(leaf) is float and self._has_slots and not is_static:
                compute = operator.itemgetter(len(self.numbers.values))
                self.numbers.values.append(leaf)
                return Slot(self._step, name or "a number", compute, self.numbers)
            return leaf

        return map_tree(argument, replace_leaf)
