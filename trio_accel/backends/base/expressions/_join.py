"""Two programs joined as one, in which the second program reads the values of the first one from its steps.

The bits stay the same, because the result of the first program has the dtype of the array that it would be
stored in. Steps of loops and folds keep their places. Equal steps outside of them are made once.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeAlias

import attrs

from ..contract.dtypes import Ints, Strs
from ._arguments import Argument
from ._codec import EncodedProgram
from ._steps import TypedExpression, TypedStep

__all__ = ["JoinedProgram", "joined_programs"]

_Sources: TypeAlias = tuple[tuple[int, int], ...]

# These steps are unlike all others, even if they are equal.
_OF_BLOCKS = frozenset(("carried", "loop", "break", "end", "result", "fold", "left", "right", "folded"))


class _Steps:
    """The steps of the program in the making.

    Attributes:
        made: The steps.
    """

    def __init__(self) -> None:
        self.made: list[TypedStep] = []
        self._found: dict[tuple[object, ...], int] = {}

    def step(self, step: TypedStep) -> int:
        """Make a step, or return the number of an equal one."""
        # Zeros of both signs are different values.
        key = (step.function, step.dtype, step.steps, repr(step.value))
        if key not in self._found:
            self._found[key] = self.append(step)
        return self._found[key]

    def append(self, step: TypedStep) -> int:
        """Make a step, even if an equal one exists. A loop or fold gets the number of its end."""
        self.made.append(step)
        number = len(self.made) - 1
        if step.function in ("end", "folded"):
            begin = step.steps[0]
            self.made[begin] = attrs.evolve(self.made[begin], value=number)
        return number


@attrs.frozen
class JoinedProgram:
    """The program of two operations, and the origin of its arguments.

    A source is the number of an operation, 0 or 1, and a place among its arrays, loaded arrays or numbers.

    Attributes:
        program: The program.
        arrays: The sources of the element-wise arrays, in order.
        loaded: The sources of the loaded and stored arrays.
        scalars: The sources of the numbers.
    """

    program: EncodedProgram
    arrays: _Sources
    loaded: _Sources
    scalars: _Sources


def joined_programs(
    first: EncodedProgram,
    second: EncodedProgram,
    *,
    links: Collection[int],
    inputs: tuple[Sequence[Hashable], Sequence[Hashable]],
) -> JoinedProgram:
    """Join an element-wise program with the program that reads its result.

    Args:
        first: The element-wise program, with one result.
        second: The other program, which may reduce or store.
        links: The arguments of `second` that are the result of `first`. It has the shape of all elements.
        inputs: For each argument of both programs a key of its array or number. Arguments with equal keys
            become one argument. The keys of `links` do not count.

    Raises:
        ValueError: The programs cannot be joined.
    """
    _check(first, second, links)
    numbers, arguments = _numbered(first, second, links, inputs)
    stored = {int(step.value.real) for step in second.program.steps if _is_store(step)}
    changed = {numbers[1][number] for number in stored}.intersection(numbers[0].values())
    if changed:
        raise ValueError(f"the second program changes argument {min(changed)}, which the first program reads")
    usual = None
    if first.usual is not None or second.usual is not None:
        usual = _joined(first.usual or first.program, second.usual or second.program, links, numbers)
    program = EncodedProgram(_joined(first.program, second.program, links, numbers), arguments, usual)
    groups = [_argument_groups(encoded) for encoded in (first, second)]
    sources = [
        tuple([_source(number, kind, groups, numbers) for number in group])
        for kind, group in enumerate(_argument_groups(program))
    ]
    return JoinedProgram(program, *sources)


def _is_store(step: TypedStep) -> bool:
    return step.function.startswith("store_")


def _check(first: EncodedProgram, second: EncodedProgram, links: Collection[int]) -> None:
    """Require that the second program can read the value of the first one from its steps."""
    program, loads = first.program, [number for number, _ in second.program.loads]
    is_wide = any(step.is_reduction or step.function == "count" or _is_store(step) for step in program.steps)
    if is_wide or len(program.outputs) != 1:
        raise ValueError("the first program must compute one result, element by element")
    for number in links:
        argument = second.arguments[number]
        if not argument.is_array or number in loads or argument.dtype is not program.dtypes[0]:
            requirement = f"read element by element as {program.dtypes[0]}"
            raise ValueError(f"argument {number} of the second program must be {requirement}")
    # No executor checks the indices of values that nobody reads.
    if not any(step.function == "argument" and step.value in links for step in second.program.steps):
        raise ValueError("the second program must read the result of the first program")
    if len({bool(encoded.program.checked) for encoded in (first, second) if encoded.program.loads}) > 1:
        raise ValueError("both programs must check their indices, or neither")


def _numbered(
    first: EncodedProgram,
    second: EncodedProgram,
    links: Collection[int],
    inputs: tuple[Sequence[Hashable], Sequence[Hashable]],
) -> tuple[list[dict[int, int]], tuple[Argument, ...]]:
    """Return for each program the new numbers of its arguments, and the arguments."""
    numbers, new_numbers = [dict[int, int](), dict[int, int]()], dict[tuple[Argument, Hashable, str], int]()
    for program_number, program in enumerate((first, second)):
        loads, names = dict(program.program.loads), program.program.checked
        for number, (argument, key) in enumerate(zip(program.arguments, inputs[program_number], strict=True)):
            if not program_number or number not in links:
                # The error of a wrong index names the array.
                name = names[number] if names and number in loads else ""
                numbers[program_number][number] = new_numbers.setdefault(
                    (argument, key, name), len(new_numbers)
                )
    return numbers, tuple(argument for argument, _, _ in new_numbers)


def _argument_groups(program: EncodedProgram) -> tuple[Ints, Ints, Ints]:
    """Return the arrays of elements, the loaded arrays, and the numbers, in the order of a message."""
    expression, arguments = program.program, enumerate(program.arguments)
    arrays = tuple([number for number in expression.elements if program.arguments[number].is_array])
    scalars = tuple([number for number, argument in arguments if not argument.is_array])
    return arrays, tuple([number for number, _ in expression.loads]), scalars


def _source(
    number: int, kind: int, groups: Sequence[tuple[Ints, Ints, Ints]], numbers: Sequence[Mapping[int, int]]
) -> tuple[int, int]:
    """Return where an argument of the joined program is found first."""
    return next(
        (program, position)
        for program, program_groups in enumerate(groups)
        for position, argument in enumerate(program_groups[kind])
        if numbers[program].get(argument) == number
    )


def _joined(
    first: TypedExpression,
    second: TypedExpression,
    links: Collection[int],
    numbers: Sequence[Mapping[int, int]],
) -> TypedExpression:
    builder, both = _Steps(), tuple(zip((first, second), numbers, strict=True))
    first_steps = _copied(first, numbers[0], builder, {})
    steps = _copied(second, numbers[1], builder, dict.fromkeys(links, first_steps[first.outputs[0]]))
    elements = {new[number] for program, new in both for number in program.elements if number in new}
    loads = {new[number]: count for program, new in both for number, count in program.loads}
    return TypedExpression(
        tuple(builder.made),
        tuple([steps[number] for number in second.outputs]),
        elements=tuple(sorted(elements)),
        axes=tuple(dict.fromkeys((*first.axes, *second.axes))),
        loads=tuple(sorted(loads.items())),
        checked=_checked(first, second, links, numbers),
    )


def _checked(
    first: TypedExpression,
    second: TypedExpression,
    links: Collection[int],
    numbers: Sequence[Mapping[int, int]],
) -> Strs:
    """Return the names of the arguments, if a program checks the indices of its loads."""
    both = (first, second)
    if not any(program.loads and program.checked for program in both):
        return ()
    # An index that the first program passes on has the name that the second program gives it.
    result = next((second.checked[number] for number in links if second.checked), "")
    names = dict.fromkeys((number for new in numbers for number in new.values()), result)
    for program, new in reversed([*zip(both, numbers, strict=True)]):
        names |= {new[number]: name for number, name in enumerate(program.checked) if number in new}
    return tuple([names[number] for number in sorted(names)])


def _copied(
    program: TypedExpression, numbers: Mapping[int, int], builder: _Steps, substitutes: Mapping[int, int]
) -> list[int]:
    """Copy the steps of a program, and return their new numbers.

    Args:
        program: The program.
        numbers: The new numbers of its arguments.
        builder: Makes the steps.
        substitutes: The steps with the values of other arguments.
    """
    new_numbers, depth = list[int](), 0
    stored = {step.value for step in program.steps if _is_store(step)}
    for step in program.steps:
        is_store = _is_store(step)
        if step.function == "argument" and step.value in substitutes:
            new_numbers.append(substitutes[int(step.value.real)])
            continue
        depth -= step.function in ("end", "folded")
        # A store changes elements that later loads read. `_Steps.step` does not see the bits of NaN.
        is_apart = is_store or (step.function == "load" and step.value in stored) or step.value != step.value
        make = builder.append if depth or is_apart or step.function in _OF_BLOCKS else builder.step
        is_of_argument = is_store or step.function in ("argument", "load")
        value = numbers[int(step.value.real)] if is_of_argument else step.value
        new_numbers.append(
            make(
                attrs.evolve(step, steps=tuple([new_numbers[operand] for operand in step.steps]), value=value)
            )
        )
        depth += step.function in ("loop", "fold")
    return new_numbers
