"""Joined programs compute the bits of their parts, one after the other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from random_programs import (
    Sample,
    computed,
    elements,
    loaded_of,
    looping_stores,
    reductions,
    scatters,
    values_of,
)

from trio_accel.backends.base import DType
from trio_accel.backends.base.expressions import (
    Argument,
    EncodedProgram,
    TypedExpression,
    TypedStep,
    Weak,
    decode_program,
    encode_program,
    evaluate,
    joined_programs,
    parse,
    typed,
)

pytestmark = pytest.mark.no_device

Array = npt.NDArray[Any]

F, W = DType.float64, DType.int64
X = Argument(F, True)
# Rows are long enough to be added up in several parts.
SHAPE = (3, 300)


def of(
    text: str, outputs: tuple[str, ...] | None = None, *, is_checked: bool = False, **kinds: Argument
) -> EncodedProgram:
    """Type a source for arguments, which are float64 arrays unless others are given."""
    expression = parse(text, None, outputs)
    arguments = tuple(kinds.get(name, X) for name in expression.inputs)
    return EncodedProgram(
        typed(expression, tuple(each.kind for each in arguments), (), is_checked), arguments
    )


def row_of(text: str) -> EncodedProgram:
    return EncodedProgram(typed(parse(text, ("x",), is_along=True), (F,)), (X,))


def functions(program: EncodedProgram) -> list[str]:
    return [step.function for step in program.program.steps]


class Inputs:
    """Equal values for arguments with equal keys, which are numbers.

    Args:
        seed: The seed of the numbers.
        is_whole: Whether no array is broadcast, because NumPy reduces other layouts in another order.
    """

    def __init__(self, seed: int, *, is_whole: bool) -> None:
        self._seed, self._is_whole = seed, is_whole
        self._values: dict[object, Any] = {}

    def value(self, argument: Argument, key: int) -> Any:
        if (argument, key) not in self._values:
            value = values_of([argument], self._seed + key)[0]
            if value.shape[-1:] == (4,):
                value = np.resize(value, (*value.shape[:-1], SHAPE[-1]))
            if self._is_whole and argument.is_array:
                value = np.broadcast_to(value, SHAPE).copy()
            self._values[argument, key] = value
        return self._values[argument, key]

    def of(self, program: EncodedProgram, keys: Sequence[int]) -> tuple[list[Any], dict[int, Array]]:
        """Return the values of arguments, and the arrays that elements are loaded from."""
        values = [self.value(*each) for each in zip(program.arguments, keys, strict=True)]
        loaded: dict[int, Array] = {}
        for number, count in program.program.loads:
            loaded |= loaded_of([(number, count)], program.arguments, self._seed + keys[number])
        return values, loaded


def lists_of(
    program: EncodedProgram, values: Sequence[Any], loaded: dict[int, Array]
) -> tuple[list[Any], ...]:
    """Return the arrays, loaded arrays and numbers of a message."""
    arrays = [values[number] for number in program.program.elements if program.arguments[number].is_array]
    scalars = [value for value, each in zip(values, program.arguments, strict=True) if not each.is_array]
    return arrays, list(loaded.values()), scalars


def bits_of(program: TypedExpression, values: Sequence[Any], loaded: dict[int, Array]) -> object:
    made = computed(program, values, loaded, SHAPE)
    # An index that the first program passes on has its own name there.
    return re.sub(r"^\w*: ", "", made) if isinstance(made, str) else made


def check(
    first: EncodedProgram,
    second: EncodedProgram,
    at: Sequence[int],
    keys: tuple[Sequence[int], Sequence[int]],
    seed: int,
) -> None:
    """Require that the joined program computes the bits of both programs, with the arguments of both."""
    inputs = Inputs(seed, is_whole=any(step.is_reduction for step in second.program.steps))
    values, loaded = inputs.of(first, keys[0])
    stored = computed(first.program, values, loaded, SHAPE)
    joined = joined_programs(first, second, links=at, inputs=keys)
    text = encode_program(joined.program.program, joined.program.arguments, joined.program.usual)
    assert decode_program(text).program == joined.program.program

    lists = [lists_of(first, values, loaded)]
    more, other = inputs.of(second, keys[1])
    if isinstance(stored, str):
        want: object = re.sub(r"^\w*: ", "", stored)
    else:
        dtype, shape, data = stored[0]
        result = np.frombuffer(data, dtype).reshape(shape)
        want = bits_of(second.program, [result if n in at else each for n, each in enumerate(more)], other)
    lists.append(lists_of(second, more, other))
    arrays, found, scalars = (
        iter([lists[program][kind][place] for program, place in sources])
        for kind, sources in enumerate((joined.arrays, joined.loaded, joined.scalars))
    )
    made, program = list[Any](), joined.program.program
    for number, argument in enumerate(joined.program.arguments):
        made.append(None)
        if not argument.is_array:
            made[-1] = next(scalars)
        elif number in program.elements:
            made[-1] = next(arrays)
    assert bits_of(program, made, {number: next(found) for number, _ in program.loads}) == want
    assert not [*arrays, *found, *scalars]


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_a_joined_program_computes_the_same_bits(data: st.DataObject) -> None:
    kinds = [
        elements(results=3),
        elements(results=3),
        reductions(),
        reductions(),
        scatters(),
        st.builds(looping_stores),
    ]
    sample = data.draw(st.one_of(kinds))
    second, loads = EncodedProgram(sample.program, sample.arguments), dict(sample.program.loads)
    # The bounds of loops are small numbers.
    steps = sample.program.steps
    bounds = {steps[each].value for step in steps if step.function == "loop" for each in step.steps[:2]}
    places = [
        number
        for number in {int(step.value.real) for step in steps if step.function == "argument"}
        if sample.arguments[number].is_array and number not in {*loads, *bounds}
    ]
    if not places:
        reject()
    dtype = sample.arguments[data.draw(st.sampled_from(places))].dtype
    same = [number for number in places if sample.arguments[number].dtype is dtype]
    at = data.draw(st.lists(st.sampled_from(same), min_size=1, unique=True))
    one: Sample = data.draw(elements(results=1, result=dtype))
    first, numbers = EncodedProgram(one.program, one.arguments), st.integers(0, 1)
    if first.program.loads and any(step.is_reduction for step in steps):
        # Loaded values may have another layout than the stored result, so NumPy adds them in another order.
        reject()
    stored = {step.value for step in sample.program.steps if step.function.startswith("store_")}
    keys = (
        [data.draw(numbers) for _ in one.arguments],
        [7 if number in stored else data.draw(numbers) for number in range(len(sample.arguments))],
    )
    if (
        first.program.loads
        and second.program.loads
        and bool(first.program.checked) != bool(second.program.checked)
    ):
        with pytest.raises(ValueError, match="both programs must check their indices, or neither"):
            joined_programs(first, second, links=at, inputs=keys)
        return
    check(first, second, at, keys, data.draw(st.integers(0, 99)))


LOOP = "y = x\nfor k in range(n):\n    if y > 9: break\n    y = y + z[k, i(0)]"
FIRST = {
    "elements": of("y = exp(x * 0.25) - a", a=Argument(Weak.float, False)),
    "a loop": of(LOOP, n=Argument(W, True)),
    "loads": of("y = z[i(0), k] * x + z[0, k]", k=Argument(W, True)),
}
SECOND = {
    "elements": of("y = x * x + b * a", a=Argument(Weak.float, False)),
    "several results": of("y = x * x\nw = y + b\nv = x - 1", ("v", "w", "y")),
    "a loop": of(LOOP, n=Argument(W, True)),
    "a row": row_of("e = exp(x - max(x)); y = e / sum(e)"),
    "a sum": row_of("sum(x * x) / n"),
    "stores": EncodedProgram(looping_stores().program, looping_stores().arguments),
}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("second", SECOND)
def test_programs_of_all_kinds_are_joined(first: str, second: str) -> None:
    one, other = FIRST[first], SECOND[second]
    at = [1] if second == "stores" else [0]
    for keys in (([0, 1, 2, 3], [4, 5, 6, 7]), ([0, 1, 2, 3], [0, 1, 2, 3])):
        if second == "stores":
            keys[1][2] = 8
        given = keys[0][: len(one.arguments)], keys[1][: len(other.arguments)]
        check(one, other, at, given, 5)


def test_equal_inputs_and_equal_steps_are_made_once() -> None:
    first, second = of("y = exp(x) * a"), of("z = y - exp(x) * b")
    joined = joined_programs(first, second, links=[0], inputs=(["p", "q"], ["", "p", "q"]))
    assert joined.program.arguments == (X, X)
    assert functions(joined.program) == ["argument", "argument", "exp", "multiply", "subtract"]
    assert joined.program.program.steps[-1].steps == (3, 3)
    assert (joined.arrays, joined.loaded, joined.scalars) == (((0, 0), (0, 1)), (), ())
    joined = joined_programs(first, second, links=[0], inputs=(["p", "q"], ["", "r", "s"]))
    assert functions(joined.program).count("exp") == 2
    assert joined.arrays == ((0, 0), (0, 1), (1, 1), (1, 2))


def test_one_key_of_arguments_in_other_forms_has_an_argument_for_each() -> None:
    first, second = of("y = x * n", n=Argument(Weak.int, False)), of("z = y + n", n=Argument(W, False))
    joined = joined_programs(first, second, links=[0], inputs=([0, 1], [2, 1]))
    assert joined.program.arguments == (X, Argument(Weak.int, False), Argument(W, False))
    assert joined.scalars == ((0, 0), (1, 0))


def test_an_array_may_be_read_and_loaded_from() -> None:
    first, second = of("y = x + 1"), of("w = y * z[i(0), 2]")
    joined = joined_programs(first, second, links=[0], inputs=([0], [1, 0]))
    assert joined.program.arguments == (X,)
    assert (joined.program.program.elements, joined.program.program.loads) == ((0,), ((0, 2),))
    assert (joined.arrays, joined.loaded) == (((0, 0),), ((1, 0),))


def test_steps_of_loops_keep_their_places() -> None:
    text = "y = x\nfor k in range(n):\n    y = y + exp(x) * k * 0.5"
    first, second = of(text, n=Argument(W, True)), of(text, n=Argument(W, True))
    joined = joined_programs(first, second, links=[0], inputs=([0, 1], [2, 1]))
    steps = joined.program.program.steps
    loops = [number for number, step in enumerate(steps) if step.function == "loop"]
    assert [steps[int(steps[each].value.real)].function for each in loops] == ["end", "end"]
    assert [step.value for step in steps if step.function == "constant"] == [0, 0.5]
    assert functions(joined.program).count("cast") == 2


def test_the_usual_program_is_joined_likewise() -> None:
    usual, program = (
        row_of("sqrt(sum(x * x))"),
        row_of("m = max(abs(x)); y = m * sqrt(sum((x / m) * (x / m)))"),
    )
    second, first = EncodedProgram(program.program, (X,), usual.program), of("y = a - b")
    joined = joined_programs(first, second, links=[0], inputs=([0, 1], [2])).program
    assert joined.usual is not None
    x = np.random.default_rng(3).normal(size=(2, 3, 5))
    for made, part in ((joined.program, program), (joined.usual, usual)):
        (got,) = evaluate(made, list(x), shape=(3, 5), axes=(1,))
        (want,) = evaluate(part.program, [x[0] - x[1]], shape=(3, 5), axes=(1,))
        np.testing.assert_array_equal(got, want)
    text = encode_program(joined.program, joined.arguments, joined.usual)
    assert decode_program(text) == joined
    first = EncodedProgram(first.program, first.arguments, of("y = a + (-b)").program)
    joined = joined_programs(first, program, links=[0], inputs=([0, 1], [2])).program
    assert joined.usual is not None
    names = [[step.function for step in each.steps] for each in (joined.program, joined.usual)]
    assert ["negative" in each for each in names] == [False, True]
    assert [each.count("sqrt") for each in names] == [1, 1]


def test_wrong_indices_have_the_names_of_both_programs() -> None:
    j = Argument(W, True)
    first = of("y = u[j, 0] + 1", j=j, is_checked=True)
    second = of("w = y + v[k]", k=j, is_checked=True)
    joined = joined_programs(first, second, links=[0], inputs=([0, 1], [2, 3, 4])).program.program
    assert joined.checked == ("u", "j", "v", "k")
    arrays = {0: np.ones((2, 2)), 2: np.ones(3)}
    for values, message in (((5, 0), "j: 5 is outside axis 0 of u"), ((0, 7), "k: 7 is outside axis 0 of v")):
        made = computed(joined, [None, np.array(values[0]), None, np.array(values[1])], arrays, (1,))
        assert str(made).startswith(message)
    same = joined_programs(first, second, links=[0], inputs=([0, 1], [2, 0, 1])).program.program
    assert same.checked == ("u", "j", "v")
    first = of("y = int64(a)", a=Argument(DType.int32, True))
    joined = joined_programs(
        first, of("w = v[y]", y=j, is_checked=True), links=[1], inputs=([0], [1, 2])
    ).program.program
    made = computed(joined, [np.array(9, np.int32), None], {1: np.ones(3)}, (1,))
    assert str(made).startswith("y: 9 is outside axis 0 of v")


def test_loads_of_stored_elements_are_not_shared() -> None:
    steps = (
        TypedStep("argument", F, (), 0),
        TypedStep("constant", W, (), 0),
        TypedStep("load", F, (1,), 1),
        TypedStep("store_set", F, (0, 1), 1),
        TypedStep("load", F, (1,), 1),
        TypedStep("subtract", F, (4, 2)),
    )
    second = EncodedProgram(TypedExpression(steps, (5,), elements=(0,), loads=((1, 1),)), (X, X))
    joined = joined_programs(of("y = x * 2"), second, links=[0], inputs=([0], [1, 2])).program
    assert functions(joined).count("load") == 2
    (got,) = evaluate(joined.program, [np.array([3.0]), None], {}, {1: np.ones(1)}, shape=(1,))
    assert got == 5


def test_nan_keeps_its_bits() -> None:
    quiet = np.copysign(np.nan, -1).item()
    steps = (
        TypedStep("argument", F, (), 0),
        TypedStep("constant", F, (), np.nan),
        TypedStep("copysign", F, (0, 1)),
    )
    first = EncodedProgram(TypedExpression(steps, (2,), elements=(0,)), (X,))
    steps = (
        TypedStep("argument", F, (), 0),
        TypedStep("constant", F, (), quiet),
        TypedStep("copysign", F, (0, 1)),
    )
    second = EncodedProgram(TypedExpression(steps, (2,), elements=(0,)), (X,))
    joined = joined_programs(first, second, links=[0], inputs=([0], [1])).program.program
    assert evaluate(joined, [np.array(2.0)])[0] == -2


UNREAD = EncodedProgram(TypedExpression((TypedStep("argument", F, (), 0),), (0,), elements=(0, 1)), (X, X))


@pytest.mark.parametrize(
    ("first", "second", "at", "keys", "words"),
    [
        (row_of("sum(x)"), of("x + 1"), 0, ([0], [1]), "must compute one result, element by element"),
        (row_of("x / n"), of("x + 1"), 0, ([0], [1]), "must compute one result, element by element"),
        (of("y = x; z = x + 1", ("y", "z")), of("x + 1"), 0, ([0], [1]), "must compute one result"),
        (of("x * 2"), of("x + 1", x=Argument(DType.float32, True)), 0, ([0], [1]), "by element as float64"),
        (of("x * 2"), UNREAD, 1, ([0], [1, 2]), "must read the result"),
        (of("x * 2"), of("y + x[0]"), 1, ([0], [1, 2]), "argument 1 of the second"),
        (of("x * 2"), of("y + a", a=Argument(F, False)), 1, ([0], [1, 2]), "argument 1 of the second"),
        (of("z[0] * 2"), of("y + z[0]", is_checked=True), 0, ([0], [1, 2]), "check their indices"),
        (of("x[0] * 2"), SECOND["stores"], 1, ([0], [1, 2, 0]), "the second program changes argument 0"),
        (of("x * 2"), SECOND["stores"], 1, ([0], [1, 2, 0]), "the second program changes argument 0"),
    ],
)
def test_programs_that_cannot_be_joined_are_refused(
    first: EncodedProgram, second: EncodedProgram, at: int, keys: tuple[list[int], list[int]], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        joined_programs(first, second, links=[at], inputs=keys)
