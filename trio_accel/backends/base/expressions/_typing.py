"""Types of an expression: NumPy's promotion (NEP 50), step by step."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn, TypeAlias, cast

import numpy as np

from ..contract.dtypes import DType, Ints
from ..contract.errors import NotSupportedError
from ..contract.ops import identity_of, real_of
from . import _expression as nodes  # pyright: ignore[reportPrivateUsage]  # of this package
from ._expression import FUNCTIONS, Apply, Location, Node, Reduce, ScalarFunction, assigned_in
from ._parse import COUNT, parse
from ._promotion import PYTHON, RANKS, common_of, is_whole, wider
from ._reduction import accumulated
from ._steps import BY_PYTHON, ArgumentType, TypedExpression, TypedStep, Weak, by_python, why_outside

__all__ = ["typed"]

_LOW = (DType.float8_e4m3fn, DType.float8_e5m2)
_INT64 = np.iinfo(np.int64)
# These functions accept Python numbers only as such; other functions convert them to arrays of their types.
_WEAK_ARITHMETIC = ("divide", *BY_PYTHON)
# Rounds in which an expression that combines values finds the dtype that it takes and makes.
_MOST_ROUNDS = 4


@functools.lru_cache(4096)
def typed(
    expression: nodes.ParsedExpression,
    arguments: tuple[ArgumentType, ...],
    dtypes: tuple[DType | None, ...] = (),
    is_checked: bool = False,
) -> TypedExpression:
    """Find the types of an expression.

    Args:
        expression: The expression.
        arguments: Types of its inputs.
        dtypes: Types that the results are converted to; None for no conversion.
        is_checked: Whether an index outside of an array fails the operation.

    Raises:
        TypeError: A function does not support these types; the message shows the place.
        NotSupportedError: NumPy supports them, but no backend here.
        ValueError: A type cannot hold its number.
    """
    typist = _Typist(expression, arguments, is_checked=is_checked)
    typist.run(expression.statements)
    return typist.finish(dtypes or (None,) * len(expression.outputs))


_Kinds: TypeAlias = dict[str, ArgumentType]


class _Typist:
    """Makes the steps; equal steps are made once, in the outermost loop where all that they need is there."""

    def __init__(
        self, expression: nodes.ParsedExpression, arguments: tuple[ArgumentType, ...], *, is_checked: bool
    ) -> None:
        self._expression, self._is_checked = expression, is_checked
        self._steps: list[TypedStep] = []
        self._found: dict[tuple[object, ...], int] = {}
        # For each step, how many loops are around it; and the steps of each open loop, in order.
        self._depths: list[int] = []
        self._blocks: list[list[int]] = [[]]
        # Each open loop has its step, the steps of its variables, and the types that these need to have.
        self._loops: list[tuple[int, Mapping[str, int], _Kinds]] = []
        # A loop has its end and its breaks here, by the number of its step.
        self._ends: dict[int, int] = {}
        self._breaks: dict[int, list[int]] = {}
        # Smallest and largest numbers of no dtype yet, and the reductions that begin with them.
        self._nothings: dict[int, str] = {}
        # Integers that loops change, so that Python cannot compute them in advance.
        self._changing: set[int] = set()
        # The weak steps, by their numbers.
        self._weak: dict[int, Weak] = {}
        self._names: dict[str, int] = {}
        # Each name has the place where it was assigned last.
        self._locations: dict[str, Location] = {}
        self._bounds: dict[tuple[int, DType], None] = {}
        # The result of a declared reduction has the value that it was rounded from here.
        self._unrounded: dict[int, int] = {}
        self._reductions: list[int] = []
        for number, (name, kind) in enumerate(zip(expression.inputs, arguments, strict=True)):
            if kind in _LOW:
                raise NotSupportedError(
                    f"{name} is of {kind}, which expressions do not compute with; use cast()"
                )
            if name in expression.elements:
                dtype = kind.carrier if isinstance(kind, Weak) else kind
                self._names[name] = self._step(TypedStep("argument", dtype, (), number), kind)
        self._kinds = dict(zip(expression.inputs, arguments, strict=True))

    def run(self, statements: Sequence[nodes.Statement]) -> None:
        for statement in statements:
            if isinstance(statement, nodes.Loop):
                self._loop(statement)
            elif isinstance(statement, nodes.Break):
                self._break(statement)
            else:
                name, node = statement
                self._names[name], self._locations[name] = self._node(node), node.location

    def finish(self, dtypes: Sequence[DType | None]) -> TypedExpression:
        outputs: list[int] = []
        for name, dtype in zip(self._expression.outputs, dtypes, strict=True):
            number = self._strong(self._names[name])
            if dtype is not None:
                number = self._unrounded.get(number, number)
            outputs.append(number if dtype is None else self._convert(number, dtype, self._locations[name]))
        outputs = self._flatten(outputs)
        inputs, loads = self._expression.inputs, self._expression.loads
        axes = dict.fromkeys(int(step.value.real) for step in self._steps if step.function == "index")
        return TypedExpression(
            steps=tuple(self._steps),
            outputs=tuple(outputs),
            bounds=tuple(self._bounds),
            elements=tuple(n for n, name in enumerate(inputs) if name in self._expression.elements),
            axes=tuple(axes),
            loads=tuple((n, loads[name]) for n, name in enumerate(inputs) if name in loads),
            checked=inputs if self._is_checked else (),
        )

    def _flatten(self, outputs: Sequence[int]) -> list[int]:
        """Bring the needed steps into the order of the source, with the steps of loops between the others.

        Steps that were typed with the wrong types of a loop's variables are not needed.
        """
        live = set[int]()
        self._find_live(live, [*outputs, *[number for number, _ in self._bounds]])
        if live.isdisjoint(self._reductions):
            # Executors know by its reductions that a program is along axes.
            self._find_live(live, self._reductions[:1])
        order = [number for number in self._blocks[0] if number in live]
        new = {number: position for position, number in enumerate(order)}
        steps: list[TypedStep] = []
        for number in order:
            step = self._steps[number]
            value = new[self._ends[number]] if number in self._ends else step.value
            steps.append(
                TypedStep(step.function, step.dtype, tuple(new[operand] for operand in step.steps), value)
            )
        self._steps = steps
        self._bounds = {(new[number], dtype): None for number, dtype in self._bounds}
        return [new[number] for number in outputs]

    def _find_live(self, live: set[int], numbers: Sequence[int]) -> None:
        todo = [*numbers]
        while todo:
            number = todo.pop()
            if number not in live:
                live.add(number)
                todo += (*self._steps[number].steps, *self._breaks.get(number, ()))

    def _step(self, step: TypedStep, kind: ArgumentType | None = None) -> int:
        weak = kind if isinstance(kind, Weak) else None
        # Zeros of both signs are different values.
        key = (step.function, step.dtype, step.steps, repr(step.value), weak)
        number = self._found.get(key)
        if number is None:
            depth = max((self._depths[operand] for operand in step.steps), default=0)
            number = self._found[key] = self._new(step, depth, weak)
            self._blocks[depth].append(number)
        return number

    def _in_place(self, step: TypedStep) -> int:
        """Make a step that may fail in the loop of its text, where no loop around has made it before."""
        keys = [(step, loop) for loop in (None, *[loop for loop, _, _ in self._loops])]
        number = next((self._found[key] for key in keys if key in self._found), None)
        if number is None:
            # An iteration that does not run fails nothing.
            number = self._found[keys[-1]] = self._new(step, len(self._loops), None)
            self._blocks[-1].append(number)
        return number

    def _new(self, step: TypedStep, depth: int, kind: ArgumentType | None) -> int:
        """Make a step that differs from all others, without a place yet."""
        number = len(self._steps)
        self._steps.append(step)
        self._depths.append(depth)
        if isinstance(kind, Weak):
            self._weak[number] = kind
        if any(operand in self._changing for operand in step.steps):
            self._changing.add(number)
        return number

    def _loop(self, loop: nodes.Loop) -> None:
        """Type a loop, once more where its body makes other numbers of the Python numbers that it carries."""
        problem = "a range takes integers"
        over = [
            self._whole_index(self._node(bound), bound.location, problem) for bound in (loop.start, loop.stop)
        ]
        names = dict(self._names)
        first = {name: self._kind(names[name]) for name in assigned_in(loop.body) if name in names}
        kinds, needed = _Kinds(), first
        while needed != kinds:
            kinds, self._names = needed, dict(names)
            needed = self._loop_of(loop, over, kinds)
            for name, kind in needed.items():
                if isinstance(first[name], DType) and kind is not first[name]:
                    problem = f"the loop makes {kind.value} of {name}, which is {first[name]} before it"
                    self._refuse(f"{problem}: convert the one or the other", self._locations[name], TypeError)

    def _loop_of(self, loop: nodes.Loop, over: Sequence[int], kinds: _Kinds) -> _Kinds:
        """Type a loop for certain types of its variables; return the types that they need."""
        depth, names = len(self._blocks), dict(self._names)
        carried: dict[str, int] = {}
        for name, kind in kinds.items():
            first = self._as_kind(names[name], kind, loop.location)
            step = TypedStep("carried", self._steps[first].dtype, (first,))
            carried[name] = self._new(step, depth, kind)
        index = self._new(TypedStep("loop", DType.int64, (*over, *carried.values())), depth, Weak.int)
        self._changing.update((index, *carried.values()))
        self._names |= {**carried, loop.index: index}
        self._loops.append((index, carried, dict(kinds)))
        self._blocks.append([])
        self.run(loop.body)
        end = self._new(TypedStep("end", DType.int64, (index, *self._carried_values())), depth, None)
        self._ends[index] = end
        body = self._blocks.pop()
        self._blocks[-1] += (*carried.values(), index, *body, end)
        for name, number in carried.items():
            step = TypedStep("result", self._steps[number].dtype, (number, end))
            names[name] = self._new(step, depth - 1, kinds[name])
            self._blocks[-1].append(names[name])
        self._names = names
        return self._loops.pop()[2]

    def _break(self, node: nodes.Break) -> None:
        condition = self._convert(
            self._strong(self._node(node.condition)), DType.bool, node.condition.location
        )
        loop = self._loops[-1][0]
        step = TypedStep("break", DType.bool, (loop, condition, *self._carried_values()))
        number = self._new(step, len(self._loops), None)
        self._blocks[-1].append(number)
        self._breaks.setdefault(loop, []).append(number)

    def _carried_values(self) -> list[int]:
        """Return the values that the innermost loop carries now, in the types that it carries them in."""
        (_, variables, needed), values = self._loops[-1], list[int]()
        for name, carried in variables.items():
            number, kind, location = self._names[name], self._kind(carried), self._locations.get(name, (1, 0))
            needed[name] = wider(needed[name], self._kind(number))
            # With another type, all of the loop is typed once more.
            values.append(self._as_kind(number, kind, location) if needed[name] == kind else carried)
        return values

    def _as_kind(self, number: int, kind: ArgumentType, location: Location) -> int:
        """Return a value converted to another type, which may be the type of a Python number."""
        dtype = kind.carrier if isinstance(kind, Weak) else kind
        if number in self._nothings:
            return self._step(
                TypedStep("constant", dtype, (), identity_of(self._nothings[number], dtype)), kind
            )
        if self._kind(number) == kind:
            return number
        if isinstance(kind, Weak):
            return self._step(TypedStep("cast", dtype, (number,)), kind)
        return self._convert(number, kind, location)

    def _node(self, node: Node) -> int:
        match node:
            case nodes.Literal():
                number = self._literal(node)
            case nodes.Index():
                number = self._step(TypedStep("index", DType.int64, (), node.axis))
            case nodes.ElementLoad():
                number = self._load(node)
            case Apply():
                number = self._apply(node)
            case nodes.ElementCount():
                number = self._step(TypedStep("count", DType.int64), Weak.int)
            case Reduce():
                number = self._reduce(node)
            case _:
                number = self._names[node.name]
        return number

    def _reduce(self, node: Reduce) -> int:
        """Reduce a value in the accumulator's dtype, and round the result."""
        number = self._strong(self._node(node.value))
        chosen, combine = node.dtype or self._steps[number].dtype, None
        if node.combine is None:
            rounded, accumulator = accumulated(node.name, chosen, is_chosen=node.dtype is not None)
        else:
            combine = _combined(node.combine, chosen, is_chosen=node.dtype is not None)
            (rounded,) = (accumulator,) = combine.dtypes
        number = self._cast(self._convert(number, rounded, node.location), accumulator)
        if combine is not None:
            number = self._fold(number, combine, _identity_of(node, accumulator))
        else:
            name = "sum" if node.name == "mean" else node.name
            number = self._step(
                TypedStep(f"reduce_{name}", DType.int64 if node.is_index else accumulator, (number,))
            )
        self._reductions.append(number)
        rounded = DType.int64 if node.is_index else rounded
        if node.name == "mean" or node.post is not None:
            post = node.post or parse("a / n")
            kinds: dict[str, ArgumentType] = {"a": rounded, COUNT: Weak.int}
            (rounded,) = typed(post, tuple(kinds[name] for name in post.inputs)).dtypes
            number = self._inner(
                post, {"a": number, COUNT: self._step(TypedStep("count", DType.int64), Weak.int)}
            )
        result = self._cast(number, rounded)
        if node.is_result:
            self._unrounded[result] = number
        return result

    def _inner(self, part: nodes.ParsedExpression, names: Mapping[str, int]) -> int:
        """Type a part with texts and names of its own."""
        outer = self._expression, self._names, self._locations
        self._expression, self._names, self._locations = part, dict(names), {}
        self.run(part.statements)
        number = self._strong(self._names[part.outputs[0]])
        self._expression, self._names, self._locations = outer
        return number

    def _fold(self, value: int, combine: TypedExpression, identity: complex) -> int:
        """Reduce by steps that combine two values; no other step may share those."""
        fold = self._apart(TypedStep("fold", self._steps[value].dtype, (value,)))
        dtype = self._steps[value].dtype
        sides = [self._apart(TypedStep(side, dtype, (fold,))) for side in ("left", "right")]
        numbers = list[int]()
        for step in combine.steps:
            if step.function == "argument":
                numbers.append(sides[int(step.value.real)])
                continue
            number = self._apart(
                TypedStep(step.function, step.dtype, tuple(numbers[n] for n in step.steps), step.value)
            )
            numbers.append(number)
            if step.function == "end":
                self._ends[numbers[step.steps[0]]] = number
            elif step.function == "break":
                self._breaks.setdefault(numbers[step.steps[0]], []).append(number)
        folded = self._apart(TypedStep("folded", dtype, (fold, numbers[combine.outputs[0]]), identity))
        self._ends[fold] = folded
        return folded

    def _apart(self, step: TypedStep) -> int:
        number = self._new(step, 0, None)
        self._blocks[0].append(number)
        return number

    def _apply(self, node: Apply) -> int:
        steps = tuple(self._node(argument) for argument in node.arguments)
        if node.function == "%wide":
            kind = self._kind(steps[0])
            if isinstance(kind, Weak) or kind.is_inexact:
                return steps[0]
            return self._cast(steps[0], DType.uint64 if kind.kind == "uint" else DType.int64)
        if not node.arguments:
            # It is a Python number until it meets a value: each dtype has a last number of its own.
            number = self._new(TypedStep("constant", DType.int64), 0, Weak.int)
            self._nothings[number] = node.function[1:]
            return number
        function = FUNCTIONS[node.function]
        if function.rule == "cast":
            return self._convert(self._strong(steps[0]), DType(function.name), node.location)
        return getattr(self, f"_{function.rule}")(node, function, steps)  # type: ignore[no-any-return]

    def _load(self, node: nodes.ElementLoad) -> int:
        kind = self._kinds[node.name]
        if isinstance(kind, Weak):
            self._refuse(
                f"{node.name} is a number: only an array has elements to load", node.location, TypeError
            )
        indices = tuple(self._whole_index(self._node(index), index.location) for index in node.indices)
        step = TypedStep("load", kind, indices, self._expression.inputs.index(node.name))
        return self._in_place(step) if self._is_checked else self._step(step)

    def _whole_index(
        self, number: int, location: Location, requirement: str = "an index is an integer"
    ) -> int:
        dtype = self._steps[number].dtype
        if dtype.kind not in ("int", "uint"):
            self._refuse(f"{requirement}, got {dtype}: int64(...) makes one", location, TypeError)
        if dtype is DType.uint64:
            # An index that int64 cannot hold is outside of any array.
            limit = self._step(TypedStep("constant", dtype, (), int(np.iinfo(np.int64).max)))
            number = self._step(TypedStep("minimum", dtype, (self._strong(number), limit)))
        return self._convert(number, DType.int64, location)

    def _literal(self, node: nodes.Literal) -> int:
        value = node.value
        if isinstance(value, bool):
            return self._step(TypedStep("constant", DType.bool, (), value))
        kind = {int: Weak.int, float: Weak.float, complex: Weak.complex}[type(value)]
        if kind is Weak.int:
            return self._whole_constant(cast("int", value), node.location)
        return self._step(TypedStep("constant", kind.carrier, (), value), kind)

    def _whole_constant(self, value: int, location: Location) -> int:
        if not _INT64.min <= value <= np.iinfo(np.uint64).max:
            self._refuse("an integer must have at most 64 bits", location)
        dtype = DType.int64 if value <= _INT64.max else DType.uint64
        return self._step(TypedStep("constant", dtype, (), value), Weak.int)

    def _ufunc(self, node: Apply, function: ScalarFunction, steps: Ints) -> int:
        kinds = [self._kind(number) for number in steps]
        if function.name == "power":
            self._check_power(node, kinds, steps[1])
        if all(isinstance(kind, Weak) for kind in kinds) and function.name in _WEAK_ARITHMETIC:
            if any(cast("Weak", kind).value not in function.kinds for kind in kinds):
                self._refuse_dtypes(node, kinds)
            return self._weak_arithmetic(function, steps, node.location)
        *needed, result = self._resolve(node, function, kinds)
        is_refused = any(dtype.kind not in function.kinds for dtype in needed)
        if is_refused:
            self._refuse_dtypes(node, kinds)
        return self._call(node, function.name, result, steps, needed)

    def _call(self, node: Apply, name: str, result: DType, steps: Ints, needed: Sequence[DType]) -> int:
        converted = [
            self._convert(number, dtype, argument.location)
            for number, dtype, argument in zip(steps, needed, node.arguments, strict=True)
        ]
        return self._step(TypedStep(name, result, tuple(converted)))

    def _resolve(self, node: Apply, function: ScalarFunction, kinds: list[ArgumentType]) -> list[DType]:
        """Return the types of a ufunc's arguments and result, following NumPy."""
        # A Python number never widens bfloat16; NumPy, which does not know it, would take float32.
        low = DType.bfloat16 if DType.bfloat16 in kinds else None
        dtypes = [
            (low.dtype if low is not None and kind is Weak.float else PYTHON[kind])
            if isinstance(kind, Weak)
            else kind.dtype
            for kind in kinds
        ]
        if all(isinstance(kind, Weak) for kind in kinds):
            dtypes = [cast("Weak", kind).carrier.dtype for kind in kinds]
        try:
            return [DType.of(dtype) for dtype in function.ufunc.resolve_dtypes((*dtypes, None))]
        except TypeError:
            self._refuse_dtypes(node, kinds)

    def _weak_arithmetic(self, function: ScalarFunction, steps: Ints, location: Location) -> int:
        kind = max((self._weak[number] for number in steps), key=RANKS.index)
        if function.name == "divide" and kind is Weak.int:
            kind = Weak.float
        operands = [self._steps[number] for number in steps]
        if kind is Weak.int and all(step.function == "constant" for step in operands):
            try:
                value = by_python(function.name, [cast("int", step.value) for step in operands])
            except ValueError as error:
                self._refuse(str(error), location)
            return self._whole_constant(value, location)
        converted = tuple(self._cast(number, kind.carrier) for number in steps)
        number = self._step(TypedStep(function.name, kind.carrier, converted), kind)
        if kind is Weak.int:
            # Python's integers have any size.
            self._bound(number, DType.int64)
        return number

    def _bound(self, number: int, dtype: DType) -> None:
        """Require that a dtype holds an integer, once its value is known; integers of loops are excluded."""
        if number not in self._changing:
            self._bounds[(number, dtype)] = None

    def _check_power(self, node: Apply, kinds: list[ArgumentType], number: int) -> None:
        """Refuse a power of integers with a negative Python exponent, because its value is not an integer."""
        if not all(is_whole(kind) for kind in kinds) or not isinstance(kinds[1], Weak):
            return
        step, exponent = self._steps[number], node.arguments[1]
        if step.function != "constant":
            self._bound(number, DType.uint64)
        elif step.value.real < 0:
            self._refuse(
                "a power of integers needs an exponent that is not negative; convert one of them: "
                "float64(...)",
                exponent.location,
            )

    def _where(self, node: Apply, function: ScalarFunction, steps: Ints) -> int:
        dtype = self._common(node, steps[1:])
        return self._call(node, "where", dtype, steps, [DType.bool, dtype, dtype])

    def _clip(self, node: Apply, function: ScalarFunction, steps: Ints) -> int:
        dtype = self._common(node, steps)
        if dtype.kind in ("complex", "bool"):
            self._refuse_dtypes(node, [self._kind(number) for number in steps])
        x, low, high = (
            self._convert(number, dtype, argument.location)
            for number, argument in zip(steps, node.arguments, strict=True)
        )
        return self._step(
            TypedStep("minimum", dtype, (self._step(TypedStep("maximum", dtype, (x, low))), high))
        )

    def _part(self, node: Apply, function: ScalarFunction, steps: Ints) -> int:
        number = self._strong(steps[0])
        dtype = self._steps[number].dtype
        if dtype.kind == "complex":
            return self._step(TypedStep(function.name, real_of(dtype), (number,)))
        return number if function.name == "real" else self._step(TypedStep("constant", dtype, (), 0))

    def _round(self, node: Apply, function: ScalarFunction, steps: Ints) -> int:
        is_integer = self._steps[steps[0]].dtype.kind in ("int", "uint")
        return self._strong(steps[0]) if is_integer else self._ufunc(node, function, steps)

    def _angle(self, node: Apply, function: ScalarFunction, steps: Ints) -> int:
        number = self._strong(steps[0])
        dtype = self._steps[number].dtype
        if dtype.kind == "complex":
            real = real_of(dtype)
            parts = [self._step(TypedStep(part, real, (number,))) for part in ("imag", "real")]
            return self._step(TypedStep("arctan2", real, tuple(parts)))
        if dtype.kind != "float":
            dtype = DType.float64
        zero = self._step(TypedStep("constant", dtype, (), 0.0))
        return self._step(TypedStep("arctan2", dtype, (zero, self._cast(number, dtype))))

    def _common(self, node: Apply, steps: Ints) -> DType:
        """Return the dtype that values are brought to."""
        kinds = [self._kind(number) for number in steps]
        try:
            return common_of(kinds)
        except TypeError:
            self._refuse_dtypes(node, kinds)

    def _kind(self, number: int) -> ArgumentType:
        return self._weak.get(number, self._steps[number].dtype)

    def _strong(self, number: int) -> int:
        """Return the value with its own dtype, for functions that treat Python numbers as arrays."""
        weak, step = self._weak.get(number), self._steps[number]
        # An integer may be beyond int64.
        return (
            number
            if weak is None
            else self._rigid(number, step.dtype if step.function == "constant" else weak.carrier)
        )

    def _rigid(self, number: int, dtype: DType) -> int:
        """Return a step that is not weak, with the value of a weak one."""
        step = self._steps[number]
        if step.function == "constant":
            return self._step(TypedStep("constant", dtype, (), step.value))
        return self._step(TypedStep("cast", dtype, (number,)))

    def _convert(self, number: int, dtype: DType, location: Location) -> int:
        """Return a value converted to another dtype; refuse conversions that NumPy refuses."""
        step, weak = self._steps[number], self._weak.get(number)
        source = step.dtype
        if dtype in _LOW:
            self._refuse(f"expressions do not compute with {dtype}", location, NotSupportedError)
        if source.kind == "complex" and dtype.kind not in ("complex", "bool"):
            self._refuse(
                f"{source} to {dtype} would drop the imaginary part: take real(...) or absolute(...)",
                location,
                TypeError,
            )
        if weak is Weak.int and dtype.kind in ("int", "uint"):
            self._check_held(number, dtype, location)
        if weak is not None:
            return self._rigid(number, dtype)
        return self._cast(number, dtype)

    def _check_held(self, number: int, dtype: DType, location: Location) -> None:
        """Require that a dtype holds a whole Python number, now or when there is one."""
        step = self._steps[number]
        if step.function != "constant":
            self._bound(number, dtype)
        elif reason := why_outside(cast("int", step.value), dtype):
            self._refuse(reason, location)

    def _cast(self, number: int, dtype: DType) -> int:
        if self._steps[number].dtype is dtype:
            return number
        return self._step(TypedStep("cast", dtype, (number,)), self._weak.get(number))

    def _refuse_dtypes(self, node: Apply, kinds: Sequence[ArgumentType]) -> NoReturn:
        names = ", ".join(
            f"a Python {kind.value}" if isinstance(kind, Weak) else kind.value for kind in kinds
        )
        advice = "; write x**2 for a power" if node.function == "bitwise_xor" else ""
        self._refuse(f"{node.function} does not take {names}{advice}", node.location, TypeError)

    def _refuse(
        self,
        message: str,
        location: Location,
        error: type[ValueError | TypeError | NotSupportedError] = ValueError,
    ) -> NoReturn:
        try:
            self._expression.refuse(message, location)
        except ValueError as refusal:
            raise error(str(refusal)) from None


def _identity_of(node: Reduce, dtype: DType) -> complex:
    """Return the result of no elements as a number of the accumulator's kind."""
    identity = node.identity or 0
    if dtype.is_inexact and not isinstance(identity, complex):
        # The declaring class refuses a number that the dtype does not hold.
        with suppress(OverflowError):
            return float(identity)
    return identity


def _combined(combine: nodes.ParsedExpression, value: DType, *, is_chosen: bool) -> TypedExpression:
    """Type an expression of ``a`` and ``b`` so that its result has the type of its arguments."""
    for _ in range(_MOST_ROUNDS):
        program = typed(combine, (value, value))
        (result,) = program.dtypes
        if result is value:
            return program
        if is_chosen:
            return typed(combine, (value, value), (value,))
        value = result
    raise TypeError(
        f"reduce: the result of {combine.text!r} is never of the type that it takes; give a dtype"
    )
