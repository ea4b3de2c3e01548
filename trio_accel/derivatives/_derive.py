"""The gradient of a program is a program: reverse mode over the steps of a typed expression.

A program has steps of elements, loads and loops. Its gradient by an argument that is read element by element
is a program with one result. Its gradient by a loaded argument is a list of additions. Each addition adds a
value to an element of the gradient, at the indices of the load.

A loop is run backwards. The gradient of an iteration needs the values that the iteration began with, so the
loop runs again up to it: nothing is kept, and n iterations take n * n / 2. Steps that nobody needs are
dropped, so a sum over a range takes n.

An addition in a loop has axes of its own, one for each loop around it. The index along such an axis is the
number of the iteration that adds the value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from ..backends.base import DType, NotSupportedError
from ..backends.base.contract.ops import real_of
from ..backends.base.expressions import TypedExpression, TypedStep, parse, typed
from ._scalars import BOUNDS, NOT_HOLOMORPHIC, OF_ONE, OF_TWO, STEPS
from ._steps import Builder, without_unchanged

__all__ = ["Addition", "DerivedSteps", "additions", "gradient"]


@attrs.frozen
class DerivedSteps:
    """Steps, and the numbers of the results; the last arguments are the gradients and the results."""

    steps: tuple[TypedStep, ...]
    outputs: tuple[int, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of the arguments that are read or loaded from."""
        return tuple(sorted({_number(step) for step in self.steps if step.function in ("argument", "load")}))

    @property
    def loads(self) -> frozenset[int]:
        """Numbers of the arguments that elements are loaded from."""
        return frozenset(_number(step) for step in self.steps if step.function == "load")

    def only(self, *outputs: int) -> DerivedSteps:
        """Return the program of some of its steps."""
        steps, numbers = without_unchanged(self.steps, outputs)
        return DerivedSteps(tuple(steps), tuple(numbers))


@attrs.frozen
class Addition:
    """A value to add to an element of an argument's gradient.

    Attributes:
        program: Its results are the value, followed by the indices.
        counts: For each loop around the load, the program that counts its iterations.
    """

    program: DerivedSteps
    counts: tuple[DerivedSteps, ...]


def gradient(
    program: TypedExpression,
    inputs: int,
    wrt: int,
    numbers: frozenset[int] = frozenset(),
    *,
    reached: Sequence[int] = (0,),
    has_result: bool,
    passes_nan: bool = False,
) -> DerivedSteps:
    """Make the program of the gradient by an argument that is read element by element.

    Args:
        program: An expression.
        inputs: The number of its arguments.
        wrt: The argument.
        numbers: The arguments that are numbers: if a bound is such a number, the gradient at the bound is 0.
        reached: The results with gradients; the gradient is the sum over these.
        has_result: Whether the gradient may read the results instead of computing them again.
        passes_nan: Whether the gradient of NaN is not 0 if a number is a bound.

    Raises:
        NotSupportedError: A function lacks a derivative.
    """
    builder = _Gradient(
        program, inputs, wrt, numbers, reached=reached, has_result=has_result, passes_nan=passes_nan
    )
    adjoints = builder.run()
    arguments = [
        n for n, step in enumerate(program.steps) if step.function == "argument" and step.value == wrt
    ]
    dtype = program.steps[program.outputs[0]].dtype
    adjoint = adjoints.get(arguments[0]) if arguments else None
    return builder.program(builder.constant(0.0, dtype) if adjoint is None else adjoint)


def additions(
    program: TypedExpression,
    inputs: int,
    wrt: int,
    numbers: frozenset[int] = frozenset(),
    *,
    reached: Sequence[int] = (0,),
    has_result: bool,
) -> tuple[Addition, ...]:
    """Make the additions to the gradient of an argument that elements are loaded from; see `gradient`."""
    make = functools.partial(_Gradient, program, inputs, wrt, numbers, reached=reached, has_result=has_result)
    builder = make()
    builder.run()
    result: list[Addition] = []
    for number, loops in enumerate(builder.loop_counts):
        probe = make(probe=number, depth=len(loops))
        probe.run()
        result.append(Addition(probe.program(*probe.captured), tuple(map(builder.program, loops))))
    return tuple(result)


_EXTREMA = ("reduce_max", "reduce_min", "reduce_nanmax", "reduce_nanmin")


def _number(step: TypedStep) -> int:
    return int(step.value.real)


@functools.cache
def _rule(text: str, kinds: tuple[DType, ...], dtype: DType) -> TypedExpression:
    return typed(parse(text), kinds, (dtype,))


class _Gradient(Builder):
    """The steps of a program, followed by the steps of its gradient.

    Attributes:
        loop_counts: For each addition the iteration counts of the loops around it, from the outermost one in.
        captured: The value and the indices of the probed addition.
    """

    def __init__(
        self,
        program: TypedExpression,
        inputs: int,
        wrt: int,
        numbers: frozenset[int],
        *,
        reached: Sequence[int],
        has_result: bool,
        passes_nan: bool = False,
        probe: int = -1,
        depth: int = 0,
    ) -> None:
        super().__init__()
        self._old, self._outs, self._reached = program.steps, program.outputs, reached
        self._inputs, self._wrt, self._numbers = inputs, wrt, numbers
        self._has_result, self._passes_nan, self._probe, self._depth = has_result, passes_nan, probe, depth
        self._has_loops = any(step.function == "loop" for step in self._old)
        self._active = self._find_active()
        # The loops that run backwards: whether this iteration is probed, and the number of iterations.
        self._open: list[tuple[int, int]] = []
        # The conditions on which loops end: together they are always true.
        self._exits = set[int]()
        self.loop_counts: list[list[int]] = []
        self.captured: list[int] = []
        # Steps with one value for all elements that are reduced, and the step whose gradient goes back now.
        self._is_row, self._new_rows = self._find_rows(), list[bool]()
        self._user: int | None = None

    def run(self) -> dict[int, int]:
        """Make all steps; return the gradients of the program's steps."""
        copies = dict[int, int]()
        if self._depth:
            # The axes of loops follow, so axes counted from the end are shifted.
            self._old = tuple(
                attrs.evolve(step, value=step.value.real - self._depth)
                if step.function == "index" and step.value.real < 0
                else step
                for step in self._old
            )
        self.take(self._old, range(len(self._old)), copies)
        first, adjoints = self._inputs, dict[int, int]()
        for number, out in enumerate(self._outs):
            if self._has_result and self._old[out].steps:
                copies[out] = self._argument(out, first + len(self._outs) + number)
        for number in self._reached:
            self._contribute(adjoints, self._outs[number], self._argument(self._outs[number], first + number))
        if not adjoints:
            return {}
        if self._probe >= 0:
            self._begin_capture()
        self._back(range(len(self._old)), copies, adjoints)
        return adjoints

    def _argument(self, like: int, number: int) -> int:
        return self.step("argument", self._old[like].dtype, (), number)

    def program(self, *outputs: int) -> DerivedSteps:
        return DerivedSteps(tuple(self.steps), ()).only(*outputs)

    def _find_active(self) -> list[bool]:
        """Return for each step whether its value changes smoothly with the argument."""
        active, previous = [False] * len(self._old), list[bool]()
        while active != previous:
            previous = list(active)
            for number, step in enumerate(self._old):
                if step.function in ("argument", "load"):
                    active[number] = _number(step) == self._wrt and step.dtype.kind in ("float", "complex")
                elif step.function in ("end", "break"):
                    carried = self._old[step.steps[0]].steps[2:]
                    values = step.steps[1 + (step.function == "break") :]
                    for variable, value in zip(carried, values, strict=True):
                        active[variable] |= active[value]
                elif step.function == "result":
                    active[number] = active[step.steps[0]]
                elif step.function == "where":
                    active[number] = any(active[operand] for operand in step.steps[1:])
                elif step.function != "loop" and (
                    step.function not in STEPS or (step.function == "sign" and step.dtype.kind == "complex")
                ):
                    is_smooth = step.dtype.kind in ("float", "complex")
                    active[number] |= is_smooth and any(active[operand] for operand in step.steps)
        return active

    def _find_rows(self) -> list[bool]:
        """Return for each step whether it has one value for all elements along the axes."""
        rows = list[bool]()
        if not any(step.is_reduction for step in self._old):
            return [False] * len(self._old)
        if self._has_loops:
            raise NotSupportedError("loops in expressions along axes cannot be derived")
        for step in self._old:
            if step.function in ("argument", "load", "index"):
                rows.append(step.function == "argument" and _number(step) in self._numbers)
            else:
                is_row = step.is_reduction or step.function in ("constant", "count")
                rows.append(is_row or all(rows[operand] for operand in step.steps))
        return rows

    def _is_new_row(self, number: int) -> bool:
        """Return whether a step of the gradient has one value for all elements along the axes."""
        is_of_row = self._is_row[self._outs[0]]
        # A step follows its operands.
        for step in self.steps[len(self._new_rows) : number + 1]:
            if step.function == "argument":
                is_row = (is_of_row and _number(step) >= self._inputs) or _number(step) in self._numbers
            else:
                is_row = step.function not in ("load", "index") and (
                    step.is_reduction or all(self._new_rows[operand] for operand in step.steps)
                )
            self._new_rows.append(is_row)
        return self._new_rows[number]

    def _count(self, dtype: DType) -> int:
        """Return the number of elements along the axes."""
        return self.cast(self.step("count", DType.int64), dtype)

    def _is_hole(self, condition: int) -> bool:
        """Return whether a condition of the program is that a changing value equals a constant."""
        step = self._old[condition]
        if step.function != "equal":
            return False
        changing = [n for n in step.steps if self._active[n]]
        constant = [n for n in step.steps if self._old[n].function == "constant"]
        return len(changing) == len(constant) == 1

    def _is_number(self, number: int) -> bool:
        step = self.steps[number]
        while step.function == "cast":
            step = self.steps[step.steps[0]]
        return step.function == "constant" or (step.function == "argument" and _number(step) in self._numbers)

    def _contribute(self, adjoints: dict[int, int], old: int, new: int) -> None:
        if self._active[old]:
            if self._is_row[old] and self._user is not None and not self._is_row[self._user]:
                # The gradient of a value that all elements read is the sum of theirs.
                dtype = self.steps[new].dtype
                if not self._is_new_row(new):
                    new = self.step("reduce_sum", dtype, (new,))
                elif not self._is_zero(new):
                    new = self.step("multiply", dtype, (new, self._count(dtype)))
            total = adjoints.get(old)
            adjoints[old] = new if total is None else self._sum(total, new)

    def _is_zero(self, number: int) -> bool:
        step = self.steps[number]
        return step.function == "constant" and step.value == 0

    def _sum(self, lhs: int, rhs: int) -> int:
        """Add gradients. If a condition makes parts of both 0, it chooses between the sums of the others."""
        dtype, pair = self.steps[lhs].dtype, (lhs, rhs)
        for zero, rest in (pair, pair[::-1]):
            if self._is_zero(zero):
                return rest
        first, second = (self.steps[number] for number in pair)
        if first.function == second.function == "where" and first.steps[0] == second.steps[0]:
            branches = [*first.steps[1:], *second.steps[1:]]
            if any(map(self._is_zero, branches)):
                sums = [self._sum(*both) for both in zip(first.steps[1:], second.steps[1:], strict=True)]
                return self.step("where", dtype, (first.steps[0], *sums))
        return self._where_any(pair, self.step("add", dtype, pair))

    def _condition(self, g: int) -> int | None:
        """Return the condition that makes a gradient 0 where it is false; None if there is none."""
        step = self.steps[g]
        if step.function != "where" or step.steps[0] in self._exits:
            return None
        if self._is_zero(step.steps[1]):
            return self.step("logical_not", DType.bool, (step.steps[0],))
        return step.steps[0] if self._is_zero(step.steps[2]) else None

    def _where_any(self, gradients: Iterable[int], value: int) -> int:
        """Choose 0 instead of a value that comes from gradients, where conditions make all of these 0."""
        conditions = [self._condition(g) for g in gradients if not self._is_zero(g)]
        branches = [condition for condition in conditions if condition is not None]
        if not branches or None in conditions:
            return value
        chosen = functools.reduce(lambda p, q: self.step("logical_or", DType.bool, (p, q)), branches)
        return self._or_zero(chosen, value)

    def _or_zero(self, condition: int, value: int) -> int:
        dtype = self.steps[value].dtype
        return self.step("where", dtype, (condition, value, self.constant(0.0, dtype)))

    def _where_not_zero(self, g: int, make: Callable[[int], int]) -> int:
        """Apply a linear function to a gradient, but keep the zeros of branches that were not chosen.

        The derivative of such a branch may be infinite or NaN, and so would be its product with 0.
        """
        step = self.steps[g]
        is_zero = [self._is_zero(branch) for branch in step.steps[1:]]
        if step.function != "where" or is_zero.count(True) != 1:
            return make(g)
        index = 1 + is_zero.index(False)
        parts = list(step.steps)
        parts[index] = self._where_not_zero(parts[index], make)
        dtype = self.steps[parts[index]].dtype
        parts[3 - index] = self.constant(0.0, dtype)
        return self.step("where", dtype, parts)

    def _apply(self, text: str, operands: Mapping[str, int], dtype: DType, g: int) -> int:
        operands, names = {**operands, "g": g}, parse(text).inputs
        rule = _rule(text, tuple(self.steps[operands[name]].dtype for name in names), dtype)
        numbers = [n for n, step in enumerate(rule.steps) if step.function == "argument"]
        copies = {n: operands[names[_number(rule.steps[n])]] for n in numbers}
        self.take(rule.steps, range(len(rule.steps)), copies)
        return copies[rule.outputs[0]]

    # Backwards.

    def _back(self, numbers: range, copies: Mapping[int, int], adjoints: dict[int, int]) -> None:
        number = numbers.stop - 1
        while number >= numbers.start:
            step = self._old[number]
            if step.function == "end":
                self._back_loop(step.steps[0], number, copies, adjoints)
                number = step.steps[0]
            elif number in adjoints and step.function not in ("argument", "carried", "result"):
                self._back_step(number, step, copies, adjoints)
            number -= 1

    def _back_step(
        self, number: int, step: TypedStep, copies: Mapping[int, int], adjoints: dict[int, int]
    ) -> None:
        g, dtype, name = adjoints[number], step.dtype, step.function
        arguments = [copies[n] for n in step.steps]
        self._user = number
        if step.is_reduction:
            self._back_reduction(name, step.steps[0], arguments[0], copies[number], g, adjoints)
        elif name == "load":
            self._add(g, arguments)
        elif name == "where":
            zero, condition = self.constant(0.0, dtype), arguments[0]
            if self._is_hole(step.steps[0]):
                # A shortcut at a single value, as in `where(t == 0, 0, t * log(t))`, has the derivative of
                # the values around it, unless it is another value than theirs.
                agree = self.step("equal", DType.bool, tuple(arguments[1:]))
                differ = self.step("logical_not", DType.bool, (agree,))
                condition = self.step("logical_and", DType.bool, (condition, differ))
            chosen = self._where_not_zero(g, lambda g: self.step("where", dtype, (condition, g, zero)))
            self._contribute(adjoints, step.steps[1], chosen)
            chosen = self._where_not_zero(g, lambda g: self.step("where", dtype, (condition, zero, g)))
            self._contribute(adjoints, step.steps[2], chosen)
        elif name == "cast":
            to = self._old[step.steps[0]].dtype
            self._contribute(adjoints, step.steps[0], self._where_not_zero(g, lambda g: self._as(g, to)))
        elif self._bound(number, copies) is not None:
            self._back_bounds(number, copies, adjoints)
        else:
            self._back_function(number, arguments, copies[number], adjoints)

    def _back_reduction(self, name: str, old: int, x: int, y: int, g: int, adjoints: dict[int, int]) -> None:
        """The gradient of a sum goes to each element; equal extrema share theirs."""
        dtype = self.steps[x].dtype
        if self._is_row[old]:
            if name == "reduce_sum":
                g = self.step("multiply", dtype, (g, self._count(dtype)))
            elif name not in _EXTREMA:
                raise NotSupportedError(
                    f"{name.removeprefix('reduce_')} of a reduced value cannot be derived"
                )
        elif name in _EXTREMA:
            same = self.step("equal", DType.bool, (x, y))
            unit, zero = self.constant(1.0, dtype), self.constant(0.0, dtype)
            ties = self.step("reduce_sum", dtype, (self.step("where", dtype, (same, unit, zero)),))
            g = self.step("where", dtype, (same, self.step("divide", dtype, (g, ties)), zero))
        elif name != "reduce_sum":
            raise NotSupportedError(f"{name.removeprefix('reduce_')} along axes cannot be derived")
        self._contribute(adjoints, old, g)

    def _back_function(self, number: int, arguments: Sequence[int], y: int, adjoints: dict[int, int]) -> None:
        step, g = self._old[number], adjoints[number]
        texts = self._texts(step.function, arguments)
        operand = self._old[step.steps[0]].dtype
        if operand.kind == "complex" and step.function not in NOT_HOLOMORPHIC:
            # The gradient by a complex number z is the gradient by its real part, plus i times the gradient
            # by its imaginary part: g times the conjugate of the derivative, which is the derivative at the
            # conjugate.
            arguments = [self._conjugate(n) for n in arguments]
            y = self._conjugate(y)
        operands = dict(zip("ab", arguments, strict=False)) | {"y": y}
        for old, text in zip(step.steps, texts, strict=True):
            if text is not None and self._active[old]:
                dtype = self._old[old].dtype
                make = functools.partial(self._apply, text, operands, dtype)
                self._contribute(adjoints, old, self._where_not_zero(g, make))

    def _bound(self, number: int, copies: Mapping[int, int]) -> tuple[int, int] | None:
        """Return array and bound, given the extremum of an array and a number."""
        step = self._old[number]
        pairs = [step.steps, step.steps[::-1]] if step.function in BOUNDS else []
        return next(
            ((array, copies[bound]) for array, bound in pairs if self._is_number(copies[bound])), None
        )

    def _back_bounds(self, number: int, copies: Mapping[int, int], adjoints: dict[int, int]) -> None:
        """Zero a gradient outside of bounds that are numbers; the bounds of a `clip` are one step."""
        g, limits, array = adjoints[number], list[tuple[str, int]](), number
        while (pair := self._bound(array, copies)) is not None and not (limits and self._has_loops):
            limits.append((BOUNDS[self._old[array].function][self._passes_nan], pair[1]))
            array = pair[0]
        conditions = [self.step(name, DType.bool, (copies[array], bound)) for name, bound in limits]
        join = "logical_or" if self._passes_nan else "logical_and"
        condition = functools.reduce(lambda lhs, rhs: self.step(join, DType.bool, (lhs, rhs)), conditions)

        def make(g: int) -> int:
            zero = self.constant(0.0, self.steps[g].dtype)
            parts = (condition, zero, g) if self._passes_nan else (condition, g, zero)
            return self.step("where", self.steps[g].dtype, parts)

        self._contribute(adjoints, array, self._where_not_zero(g, make))

    def _conjugate(self, number: int) -> int:
        dtype = self.steps[number].dtype
        return self.step("conjugate", dtype, (number,)) if dtype.kind == "complex" else number

    def _as(self, number: int, dtype: DType) -> int:
        """Return a gradient in the dtype of its value: of a real number it is real."""
        if self.steps[number].dtype.kind == "complex" and dtype.kind != "complex":
            number = self.step("real", real_of(self.steps[number].dtype), (number,))
        return self.cast(number, dtype)

    def _texts(self, name: str, arguments: Sequence[int]) -> Sequence[str | None]:
        """Return the derivatives of a function by each of its arguments."""
        if name in OF_ONE:
            return [OF_ONE[name]]
        if name not in OF_TWO:
            raise NotSupportedError(f"{name} has no gradient")
        by_base, by_exponent = OF_TWO[name]
        exponent = self.steps[arguments[1]]
        if name == "power" and exponent.function == "constant" and exponent.value:
            by_base = "2 * g * a" if exponent.value == 2 else "g * b * a ** (b - 1)"
        return by_base, by_exponent

    def _add(self, g: int, indices: Sequence[int]) -> None:
        """Add a gradient to the element that a load has read, or capture it where it is probed."""
        number = len(self.loop_counts)
        self.loop_counts.append([count for _, count in self._open])
        if number != self._probe:
            return
        values = [g, *indices]
        for is_here, _ in self._open:
            values = [
                self.step("where", self.steps[value].dtype, (is_here, value, previous))
                for value, previous in zip(values, self.captured, strict=True)
            ]
        self.captured = values

    def _begin_capture(self) -> None:
        load = self._load_of_probe()
        zero = self.constant(0, DType.int64)
        self.captured = [self.constant(0.0, load.dtype), *[zero] * len(load.steps)]

    def _load_of_probe(self) -> TypedStep:
        # All loads of an argument have one dtype, and take the same number of indices.
        return next(step for step in self._old if step.function == "load" and _number(step) == self._wrt)

    def _back_loop(self, loop: int, end: int, copies: Mapping[int, int], adjoints: dict[int, int]) -> None:
        """Run a loop backwards; its values are computed again for each iteration."""
        start, stop, *carried = self._old[loop].steps
        results = {
            step.steps[0]: n
            for n, step in enumerate(self._old)
            if step.function == "result" and step.steps[1] == end
        }
        active = [n for n in carried if self._active[n]]
        if not any(results.get(n) in adjoints for n in active):
            return
        body = range(loop + 1, end)
        breaks = [n for n in body if self._old[n].function == "break" and self._old[n].steps[0] == loop]
        read = self._read_from_outside(loop, end, carried)
        one, zero = self.constant(1, DType.int64), self.constant(0, DType.int64)
        first = copies[start]
        # The maximum, because the difference of the bounds of an empty range may be below the smallest int64.
        end_of_range = self.step("maximum", DType.int64, (copies[stop], first))
        count = limit = self.step("subtract", DType.int64, (end_of_range, first))
        if breaks:
            count = self._copied(loop, end, copies, copies[stop], is_counted=True)[-1]
        result_adjoints = {n: adjoints[results[n]] for n in active if results.get(n) in adjoints}
        variables = [self._carried(n, result_adjoints.get(n)) for n in active]
        sums = [self._carried(n, None) for n in read]
        captured = [self.new("carried", self.steps[n].dtype, (n,)) for n in self.captured]
        back = self.new("loop", DType.int64, (zero, count, *variables, *sums, *captured))
        iteration = self.step(
            "subtract", DType.int64, (self.step("subtract", DType.int64, (count, one)), back)
        )
        body_copies = self._values_at(loop, end, copies, self.step("add", DType.int64, (first, iteration)))
        mine = self._seeds(breaks, end, carried, dict(zip(active, variables, strict=True)), body_copies)
        axis_index = self.step(
            "index", DType.int64, (), len(self._open) - max(self._depth, len(self._open) + 1)
        )
        self._open.append((self.step("equal", DType.bool, (iteration, axis_index)), limit))
        self.captured = captured
        self._back(body, body_copies, mine)
        self._open.pop()
        next_adjoints = [mine[n] if n in mine else self.constant(0.0, self._old[n].dtype) for n in active]
        totals = [
            self.step("add", self._old[n].dtype, (total, mine[n])) if n in mine else total
            for n, total in zip(read, sums, strict=True)
        ]
        # All iterations may have chosen 0.
        may_be_zero = {n for n, g in mine.items() if self._condition(g) is not None}
        ended = self.new("end", DType.int64, (back, *next_adjoints, *totals, *self.captured))
        inputs = [self._old[n].steps[0] for n in active]
        for old, n, variable in zip([*inputs, *read], [*active, *read], [*variables, *sums], strict=True):
            g = self._result(variable, ended)
            if n in may_be_zero:
                zero = self.constant(0.0, self.steps[g].dtype)
                g = self._or_zero(self.step("not_equal", DType.bool, (g, zero)), g)
            self._contribute(adjoints, old, self._where_any(result_adjoints.values(), g))
        self.captured = [self._result(n, ended) for n in captured]

    def _carried(self, old: int, first: int | None) -> int:
        dtype = self._old[old].dtype
        return self.new("carried", dtype, (self.constant(0.0, dtype) if first is None else first,))

    def _result(self, variable: int, ended: int) -> int:
        return self.new("result", self.steps[variable].dtype, (variable, ended))

    def _read_from_outside(self, loop: int, end: int, carried: Sequence[int]) -> list[int]:
        """Return the steps before a loop that its iterations read, and that need a gradient."""
        numbers = {
            operand
            for n in range(loop + 1, end + 1)
            for operand in self._old[n].steps
            if operand < loop and operand not in carried and self._active[operand]
        }
        return sorted(numbers)

    def _values_at(self, loop: int, end: int, copies: Mapping[int, int], index: int) -> dict[int, int]:
        """Compute the steps of the iteration with an index."""
        carried = self._old[loop].steps[2:]
        values = self._copied(loop, end, copies, index)
        body_copies = {n: number for n, number in copies.items() if not loop <= n <= end}
        body_copies |= dict(zip(carried, values, strict=True)) | {loop: index}
        body = [n for n in range(loop + 1, end) if not self._ends(n, loop)]
        self.take(self._old, body, body_copies)
        return body_copies

    def _ends(self, number: int, loop: int) -> bool:
        step = self._old[number]
        return step.function == "break" and step.steps[0] == loop

    def _seeds(
        self,
        breaks: Sequence[int],
        end: int,
        carried: Sequence[int],
        variables: Mapping[int, int],
        copies: Mapping[int, int],
    ) -> dict[int, int]:
        """Return the gradients of the values that an iteration leaves, at a break or at its end."""
        mine = dict[int, int]()
        goes_on: int | None = None
        for n in breaks:
            ends = copies[self._old[n].steps[1]]
            stays = self.step("logical_not", DType.bool, (ends,))
            if goes_on is None:
                taken, goes_on = ends, stays
            else:
                taken = self.step("logical_and", DType.bool, (goes_on, ends))
                goes_on = self.step("logical_and", DType.bool, (goes_on, stays))
            self._seed(mine, dict(zip(carried, self._old[n].steps[2:], strict=True)), variables, taken)
        self._seed(mine, dict(zip(carried, self._old[end].steps[1:], strict=True)), variables, goes_on)
        return mine

    def _seed(
        self,
        mine: dict[int, int],
        values: Mapping[int, int],
        variables: Mapping[int, int],
        condition: int | None,
    ) -> None:
        for n, variable in variables.items():
            if self._active[values[n]]:
                dtype, g = self._old[n].dtype, variable
                if condition is not None:
                    self._exits.add(condition)
                    # A product with 0 would make NaN of an infinite gradient.
                    g = self.step("where", dtype, (condition, g, self.constant(0.0, dtype)))
                self._contribute(mine, values[n], g)

    def _copied(
        self, loop: int, end: int, copies: Mapping[int, int], stop: int, *, is_counted: bool = False
    ) -> list[int]:
        """Run a loop again up to an index; returns what it carries then, and the iterations."""
        start, _, *carried = self._old[loop].steps
        zero, one = self.constant(0, DType.int64), self.constant(1, DType.int64)
        variables = {
            n: self.new("carried", self._old[n].dtype, (copies[self._old[n].steps[0]],)) for n in carried
        }
        counter = [self.new("carried", DType.int64, (zero,))] if is_counted else []
        body_copies = {n: number for n, number in copies.items() if not loop <= n <= end} | variables
        body_copies[loop] = self.new(
            "loop", DType.int64, (copies[start], stop, *variables.values(), *counter)
        )
        following = [self.step("add", DType.int64, (counter[0], one))] if is_counted else []
        for n in range(loop + 1, end):
            if not self._ends(n, loop):
                self.take(self._old, [n], body_copies)
            elif is_counted:
                condition, *values = [body_copies[operand] for operand in self._old[n].steps[1:]]
                self.new("break", DType.bool, (body_copies[loop], condition, *values, *following))
        final_values = [body_copies[operand] for operand in self._old[end].steps[1:]]
        ended = self.new("end", DType.int64, (body_copies[loop], *final_values, *following))
        return [self._result(variable, ended) for variable in (*variables.values(), *counter)]
