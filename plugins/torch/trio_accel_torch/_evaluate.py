"""Programs of expressions, evaluated step by step on tensors.

`trio_accel.backends.base.expressions` describes the steps.

The evaluation follows the package's own by NumPy: one pass for the results, and one for each reduction.
A loop whose elements end one by one goes on with those that are left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from trio_accel.backends.base import DType, Ints
from trio_accel.backends.base.contract.values import number_array
from trio_accel.backends.base.expressions import Argument, Pass, TypedExpression, TypedStep
from trio_accel.backends.base.expressions._evaluate import check_places

from ._numbers import apply, reduced
from ._views import carrier, cast, number

T = torch.Tensor


@attrs.define(eq=False)
class _Active:
    """The elements for which a loop still runs, one after another.

    Attributes:
        values: The values of steps; one that all elements share has no axis.
        at: Where the elements are among all.
        found: The variables of the loop, of all elements.
    """

    values: dict[int, T]
    at: T
    found: Sequence[T]

    def end(self, where: T, numbers: Sequence[int]) -> None:
        """End the loop for some elements, with these steps as the values of its variables."""
        ends = where.expand(self.at.shape)
        if not bool(ends.any()):
            return
        for found, each in zip(self.found, numbers, strict=True):
            found[self.at[ends]] = self.values[each].expand(ends.shape)[ends]
        goes = ~ends
        self.at = self.at[goes]
        self.values.update({n: value[goes] for n, value in self.values.items() if value.dim()})


@attrs.define(eq=False)
class Evaluation:
    """One evaluation.

    Attributes:
        expression: The program.
        arguments: Arrays and numbers in their carriers; None for those only loaded from or stored to.
        forms: How the program gets them.
        loaded: The arrays that elements are loaded from, or stored to, by the numbers of the arguments.
        shape: The shape of all arrays after broadcasting.
        axes: The axes that are reduced.
        device: Where it is computed.
    """

    expression: TypedExpression
    arguments: Sequence[T | None]
    forms: Sequence[Argument]
    loaded: Mapping[int, T]
    shape: Ints
    axes: Ints
    device: torch.device
    _active: _Active | None = None

    def results(self) -> list[T]:
        """Compute the results, which broadcast."""
        values: dict[int, T] = {}
        self._run(self._pass(None).numbers, values)
        return [values[each] for each in self.expression.outputs]

    def _pass(self, number: int | None) -> Pass:
        return self.expression.passes[number]

    def _run(self, numbers: Sequence[int], values: dict[int, T]) -> None:
        place, steps = 0, self.expression.steps
        active = self._active
        while place < len(numbers) and (active is None or active.at.numel()):
            each = numbers[place]
            step = steps[each]
            if step.function in ("loop", "fold"):
                (self._loop if step.function == "loop" else self._fold)(each, step, values)
                place += int(step.value.real) - each
            elif step.function == "break" and active is not None:
                active.end(values[step.steps[1]], step.steps[2:])
            else:
                made = self._value(each, step, values)
                if made is not None:
                    values[each] = made
            place += 1

    def _value(self, each: int, step: TypedStep, values: Mapping[int, T]) -> T | None:  # noqa: PLR0911
        name = step.function
        if name == "argument":
            place = int(step.value.real)
            given = self.arguments[place]
            return None if given is None else cast(given, self.forms[place].dtype, step.dtype)
        if name == "constant":
            return number(number_array(step.value, step.dtype), step.dtype, self.device)
        if name == "index":
            return self._index(int(step.value.real))
        if name == "count":
            return torch.tensor(math.prod(self.shape[axis] for axis in self.axes), device=self.device)
        if name in ("carried", "result"):
            return values[step.steps[0]]
        if name == "cast":
            return cast(values[step.steps[0]], self.expression.steps[step.steps[0]].dtype, step.dtype)
        if name == "load":
            array = self.loaded[int(step.value.real)]
            at = self._places(each, step, values, array.shape)
            return array[tuple(torch.broadcast_tensors(*at))]  # type: ignore[no-untyped-call]
        if name.startswith("store_"):
            self._store(each, step, values)
            return None
        if name.startswith("reduce_"):
            of = self.expression.steps[step.steps[0]].dtype if "arg" in name else step.dtype
            made = reduced(name.removeprefix("reduce_"), self._in_front(each, step, values), of)
            return self._kept(made)
        given_steps = [self.expression.steps[number] for number in step.steps]
        return apply(
            name, step.dtype, [values[number] for number in step.steps], [one.dtype for one in given_steps]
        )

    def _index(self, axis: int) -> T:
        along = [1] * len(self.shape)
        along[axis] = self.shape[axis]
        return torch.arange(self.shape[axis], device=self.device).reshape(along)

    def _places(self, each: int, step: TypedStep, values: Mapping[int, T], shape: Sequence[int]) -> list[T]:
        """Return indices inside of an array. An index outside is refused or becomes the nearest one."""
        at, found = [values[index] for index in step.indices], list[T]()
        for index, number_, extent in zip(at, step.indices, shape, strict=True):
            is_own = self.expression.steps[number_].function == "index"
            if self.expression.checked and not is_own and index.numel():
                low, high = int(index.min()), int(index.max())
                if low < -extent or high >= extent:
                    # The package words the error, by NumPy.
                    hosts = [np.asarray(one.cpu().numpy()) for one in at]
                    check_places(self.expression, each, hosts, tuple(shape))
            inside = index.clamp(-extent, max(extent - 1, 0))
            found.append(torch.where(inside < 0, inside + extent, inside))
        return found

    def _store(self, each: int, step: TypedStep, values: Mapping[int, T]) -> None:
        array = self.loaded[int(step.value.real)]
        shape = self.shape if self._active is None else tuple(self._active.at.shape)
        at = [index.expand(shape) for index in self._places(each, step, values, array.shape)]
        value = values[step.steps[0]].expand(shape)
        name = step.function.removeprefix("store_")
        if name == "set":
            array[tuple(at)] = value
            return
        if name == "add" and array.dtype is not torch.bool:
            # Cards add values for one element in float32 first, and halves are to be rounded at each step.
            is_far = array.is_floating_point() and array.itemsize < 4 and array.device.type != "cpu"
            near, places = (array.cpu(), [one.cpu() for one in at]) if is_far else (array, at)
            near.index_put_(tuple(places), value.to(near.device), accumulate=True)
            if is_far:
                array.copy_(near)
            return
        flat = torch.zeros(shape, dtype=torch.int64, device=self.device)
        for index, extent in zip(at, array.shape, strict=True):
            flat = flat * extent + index
        whole = array.reshape(-1)
        dtype = self.expression.steps[step.steps[0]].dtype
        combined = _combined(whole, flat.reshape(-1), value.reshape(-1), name, dtype)
        array.copy_(combined.reshape(array.shape))

    def _operands(self, each: int, values: Mapping[int, T]) -> dict[int, T]:
        return {number_: values[number_] for number_ in self._pass(None).operands[each]}

    def _in_front(self, each: int, step: TypedStep, values: Mapping[int, T]) -> T:
        """Return the operand of a reduction, with the reduced axes joined as the first axis."""
        own = self._operands(each, values)
        self._run(self._pass(each).numbers, own)
        made = own[step.steps[0]].expand(self.shape)
        kept = [axis for axis in range(made.dim()) if axis not in self.axes]
        count = math.prod(self.shape[axis] for axis in self.axes)
        return made.permute([*self.axes, *kept]).reshape(count, *[self.shape[axis] for axis in kept])

    def _kept(self, value: T) -> T:
        """Insert axes of one element in place of the reduced axes."""
        return value.reshape([1 if axis in self.axes else extent for axis, extent in enumerate(self.shape)])

    def _fold(self, each: int, step: TypedStep, values: dict[int, T]) -> None:
        """Combine elements pair by pair."""
        end, flat = int(step.value.real), self._in_front(each, step, values)
        last, steps = self.expression.steps[end], self.expression.steps
        if not len(flat):
            identity = number(np.asarray(last.value).astype(last.dtype.dtype), last.dtype, self.device)
            flat = identity.expand((1, *flat.shape[1:]))
        sides = [number_ for number_ in range(each + 1, end) if steps[number_].function in ("left", "right")]
        body = [number_ for number_ in range(each + 1, end) if number_ not in sides]
        while len(flat) > 1:
            half = len(flat) // 2
            halves = {"left": flat[:half], "right": flat[half : 2 * half]}
            pair = {**values, **{number_: halves[steps[number_].function] for number_ in sides}}
            self._run(body, pair)
            made = pair[last.steps[1]].expand(flat[:half].shape)
            flat = torch.cat([made, flat[2 * half :]]) if len(flat) % 2 else made
        values[end] = self._kept(flat[0])

    def _loop(self, each: int, step: TypedStep, values: dict[int, T]) -> None:
        """Run a loop: of all elements at once if its range is the same for all, and none ends early."""
        steps, end = self.expression.steps, int(step.value.real)
        start, stop, *carried = step.steps
        body, last = range(each + 1, end), steps[end].steps[1:]
        has_break = any(steps[one].steps[0] == each for one in body if steps[one].function == "break")
        if not has_break and not values[start].dim() and not values[stop].dim():
            for index in range(int(values[start]), int(values[stop])):
                values[each] = torch.tensor(index, device=self.device)
                self._run(body, values)
                values.update(zip(carried, [values[one] for one in last], strict=True))
            return
        active, shape = self._flattened(each, step, values)
        left = active.values
        around, self._active = self._active, active
        active.end(left[each] >= left[stop], carried)
        while active.at.numel():
            self._run(body, left)
            if active.at.numel():
                left.update(zip(carried, [left[one] for one in last], strict=True))
            for one in body:
                left.pop(one, None)
            left[each] = left[each] + 1
            active.end(left[each] >= left[stop], carried)
        self._active = around
        values.update((one, found.reshape(shape)) for one, found in zip(carried, active.found, strict=True))

    def _flattened(self, each: int, step: TypedStep, values: Mapping[int, T]) -> tuple[_Active, Any]:
        """Lay all that a loop reads out one element after another; returns the shape that they had."""
        carried = step.steps[2:]
        within = self.expression.steps[each : int(step.value.real) + 1]
        read = {number_ for one in within for number_ in one.steps if number_ < each}
        shapes = [tuple(values[number_].shape) for number_ in read]
        if any(one.function.startswith("store_") for one in within):
            shapes.append(self.shape if self._active is None else tuple(self._active.at.shape))
        shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]

        def flat(value: T) -> T:
            return value.expand(shape).reshape(-1)

        taken = {
            number_: flat(values[number_]) if values[number_].dim() else values[number_] for number_ in read
        }
        found = [flat(values[number_]).clone() for number_ in carried]
        taken[each] = flat(values[step.steps[0]])
        return _Active(taken, torch.arange(taken[each].numel(), device=self.device), found), shape


_REDUCES = {"multiply": "prod", "min": "amin", "max": "amax", "add": "amax"}


def _combined(whole: T, places: T, values: T, name: str, dtype: DType) -> T:
    """Combine values with the elements at their places."""
    if dtype is DType.uint64 and name != "multiply":
        return _combined(whole ^ -(1 << 63), places, values ^ -(1 << 63), name, DType.int64) ^ -(1 << 63)
    if dtype is DType.bool:
        # A sum is a maximum of truth values, and a product is a minimum.
        name = {"multiply": "min"}.get(name, name)
        whole, values = whole.to(torch.uint8), values.to(torch.uint8)
    made = whole.scatter_reduce(0, places, values, _REDUCES[name])
    return made.to(carrier(dtype))
