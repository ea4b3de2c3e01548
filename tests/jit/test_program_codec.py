"""Programs as texts: each means what it was made of, and no other text is one."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import Sample, bits, computed, exact, loaded_of, looping_stores, samples, values_of

from trio_accel.backends.base import DType
from trio_accel.backends.base.expressions import (
    Argument,
    TypedExpression,
    TypedStep,
    Weak,
    decode_program,
    encode_program,
    parse,
    parse_reduction,
    typed,
)

pytestmark = pytest.mark.no_device

F, W = DType.float64, DType.int64
X = Argument(F, True)
random_programs = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def of(text: str, **kinds: Argument) -> Sample:
    """Type a source for arguments, which are float64 arrays unless others are given."""
    expression = parse(text)
    arguments = tuple(kinds.get(name, X) for name in expression.inputs)
    return Sample(typed(expression, tuple(each.kind for each in arguments)), arguments)


def row_of(text: str) -> Sample:
    return Sample(typed(parse(text, ("x",), is_along=True), (F,)), (X,))


FOLDED = parse_reduction("x * x", "a if a > b else b", identity=0, post="a / n")
ENDS = "y = x\nfor k in range(n):\n    if y > 9: break\n    y = y + z[k, i(0)]"
NESTED = "y = sum(x * a + z[b, i(-1)] for a in range(n) for b in range(a))"
SAMPLES = {
    "elements": of("y = sqrt(x * a + b) - where(x > 1, 2, x)", a=Argument(Weak.float, False)),
    "a loop": of(ENDS, n=Argument(W, True)),
    "loops": of(NESTED, n=Argument(Weak.int, False)),
    "a fold": Sample(typed(FOLDED, (F,)), (X,)),
    "a row": row_of("e = exp(x - max(x)); y = e / sum(e)"),
    "stores": looping_stores(),
}


@random_programs
@given(samples(), st.integers(0, 99))
def test_a_decoded_program_is_equal_and_computes_the_same_bits(sample: Sample, seed: int) -> None:
    text = encode_program(sample.program, sample.arguments)
    made = decode_program(text)
    assert exact(made.program) == exact(sample.program)
    assert (made.arguments, made.usual) == (sample.arguments, None)
    assert encode_program(made.program, list(made.arguments)) == text
    values = values_of(sample.arguments, seed)
    loaded = loaded_of(sample.program.loads, sample.arguments, seed)
    assert computed(made.program, values, loaded) == computed(sample.program, values, loaded)


def test_the_usual_program_is_decoded_with_the_other_one() -> None:
    rows = [parse(text, ("x",), is_along=True) for text in ("sqrt(sum(x * x))", "max(x) * sqrt(sum(x * x))")]
    usual, program = (typed(each, (F,)) for each in rows)
    text = encode_program(program, [X], usual)
    made = decode_program(text)
    assert (made.program, made.arguments, made.usual) == (program, (X,), usual)
    assert encode_program(made.program, made.arguments, made.usual) == text
    assert encode_program(program, [X]) != text
    assert decode_program(text) is made


def test_texts_are_short() -> None:
    sample = of("sqrt(x * a + x)", a=Argument(DType.float32, False))
    text = encode_program(sample.program, sample.arguments)
    assert text == (
        "float64[],float32\n\noutputs=5\nargument float64 =0\nargument float32 =1\n"
        "cast float64 1\nmultiply float64 0,2\nadd float64 3,0\nsqrt float64 4"
    )
    assert len(text) < 140


NUMBERS = st.one_of(st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), st.complex_numbers())


@settings(deadline=None)
@given(NUMBERS)
def test_constants_keep_their_kinds_and_bits(value: Any) -> None:
    dtype = DType.complex128
    if isinstance(value, int):
        dtype = DType.uint64 if value > np.iinfo(np.int64).max else DType.int64
    step = TypedStep("constant", dtype, (), value)
    made = decode_program(encode_program(TypedExpression((step,), (0,)), ())).program.steps[0]
    assert bits(made.value) == bits(value)
    assert made.dtype is dtype


def test_numbers_that_compare_as_equal_have_texts_of_their_own() -> None:
    quiet, other = (
        np.array(each, np.uint64).view(np.float64).item() for each in (0xFFF8 << 48, (0x7FF8 << 48) + 7)
    )
    values = [0.0, -0.0, 0, False, 0j, complex(0, -0.0), complex(-0.0, 0), -0j, math.nan, quiet, other]
    texts = {
        encode_program(TypedExpression((TypedStep("constant", DType.complex128, (), each),), (0,)), ())
        for each in values
    }
    assert len(texts) == len(values)
    for text in texts:
        assert encode_program(decode_program(text).program, ()) == text


@pytest.mark.parametrize(
    "value", [np.float32(1.5), np.int16(-3), np.bool_(True), np.complex64(2j), np.float64(-0.0)]
)
def test_numbers_of_numpy_become_python_numbers(value: Any) -> None:
    step = TypedStep("constant", DType.complex128, (), value)
    made = decode_program(encode_program(TypedExpression((step,), (0,)), ())).program.steps[0]
    assert bits(made.value) == bits(value.item())


def test_arguments_that_no_step_reads_are_kept() -> None:
    program = TypedExpression(
        (TypedStep("constant", F, (), 1.5),),
        (0, 0),
        elements=(0, 2),
        axes=(-1, 0),
        loads=((1, 3), (2, 1)),
        checked=("a", "", "ö"),
    )
    made = decode_program(encode_program(program, [X] * 3))
    assert made.program == program


HEAD = "float64[],int64,float64[]\n\noutputs={}\n"
# The first argument is read, the second one is a number, and elements of the third one are loaded.
START = "argument float64 =0\nargument int64 =1\nload float64 1 =2\nconstant int64 =0\n"
LOOP = "carried float64 0\nloop int64 3,1,4 =7\nadd float64 4,2\nend int64 5,6\nresult float64 4,7"
FOLD = "fold float64 2 =7\nleft float64 4\nright float64 4\nfolded float64 4,5 =1"
# The parts of a program, and the words of their refusals.
BROKEN: dict[str, str] = {
    "cosh2 float64 0": "unknown function cosh2",
    "float32 float32 0": "unknown function float32",
    "add float80 0,2": "'float80' is not a valid DType",
    "add float64 0": "it must have 2 operands, got 1",
    "add float64 0,2,2": "it must have 2 operands, got 3",
    "load float64 =2": "it must have 1 operands or more, got 0",
    "add float64 0,4": "operand 4 is not an earlier step",
    "add float64 0,99": "operand 99 is not an earlier step",
    "add float64 0,-1": "a step has a function, a dtype, operands",
    "add float64 0, 2": "a step has a function, a dtype, operands",
    "add": "a step has a function, a dtype, operands",
    "": "a step has a function, a dtype, operands",
    "add float64 0,1": "add does not take float64, int64|dtypes must be",
    "add float32 0,2": "the dtypes must be float64, float64, float64, got float64, float64, float32",
    "bitwise_and float64 0,2": "bitwise_and does not take float64, float64",
    "sqrt int64 1": "sqrt does not take int64|dtypes must be",
    "real float64 0": "real does not take float64",
    "where float64 0,0,2": "the dtypes must be bool, float64, float64, float64",
    "cast float8_e5m2 0": "expressions do not compute with float8_e5m2",
    "add float64 0,2 =1": "its value must be 0, got 1",
    "argument float64 =3": "argument 3 is not among the 3 arguments",
    "argument float64 =-1": "argument -1 is not among the 3 arguments",
    "argument float32 =0": "the dtypes must be float64, got float32",
    "argument float64 =0.0": "its value must be an integer, got 0.0",
    "argument float64 =True": "its value must be an integer, got True",
    "load float64 1 =1": "argument 1 is a number",
    "load float32 1 =2": "the dtypes must be int64, float64, got int64, float32",
    "load float64 0 =2": "the dtypes must be int64, float64, got float64, float64",
    "load float64 1,1 =2": "argument 2 has 1 indices in an earlier step",
    "store_add float64 0,2 =2": "the dtypes must be float64, int64, float64",
    "store_mean float64 0,1 =2": "unknown function store_mean",
    "store_set float64 0,1 =2\nnegative float64 4": r"step 5 .*: step 4 \(store_set\) cannot be read here",
    "index int32 =0": "the dtypes must be int64, got int32",
    "index int64 =64": "an axis must be from -64 to 63, got 64",
    "count float64": "the dtypes must be int64, got float64",
    "constant uint8 =300": "uint8 does not hold 300",
    "constant int64 =18446744073709551616": "int64 does not hold",
    "constant float64 =18446744073709551616": "float64 does not hold",
    "constant float64 =1.0,2.0": "float64 does not hold",
    "constant int64 =nan": "int64 does not hold nan",
    "constant float64 =one": "one is not a number",
    "constant float64 =nan:7ff8": "nan:7ff8 is not a number",
    "constant float64 =1.0,2.0,3.0": "2.0,3.0 is not a number",
    "constant float64 =1.50": "is not written as encode_program does",
    "constant float64 =+1": "is not written as encode_program does",
    "constant int64 =1_0": "is not written as encode_program does",
    "constant float64 =nan:7ff8000000000000": "is not written as encode_program does",
    "add float64 00,2": "is not written as encode_program does",
    "reduce_mean float64 0": "unknown function reduce_mean",
    "reduce_sum float32 0": "the dtypes must be float64, float64, got float64, float32",
    "reduce_any float64 0": "the dtypes must be bool, bool, got float64, float64",
    "reduce_argmax float64 0": "the dtypes must be float64, int64, got float64, float64",
    "cast complex128 0\nreduce_max complex128 4": "reduce_max does not make complex128 of complex128",
    "cast complex128 0\ncast float64 4": "cast does not make float64 of complex128",
    "carried float64 0\nnegative float64 4": r"step 4 \(carried\) cannot be read here",
    "loop int64 3,1 =4": r"the end of step 4 \(loop\) is missing",
    "loop int64 3,1 =5\nend int64 4\nnegative int64 4": r"step 6 .*: step 4 \(loop\) cannot be read here",
    "loop int64 3,1 =6\nend int64 4": "step 5 .*: step 4 names 6 as its end",
    "loop int64 3,1 =5\nend float64 4": "the dtypes must be int64, int64, got int64, float64",
    "loop int64 0,1 =5\nend int64 4": "the dtypes must be int64, int64, int64",
    "loop int64 3,1,0 =5\nend int64 4": "step 4 .*: operand 0 is not a new variable of this loop",
    "end int64 3": "operand 3 is not the loop around the step",
    "break bool 3,0": "operand 3 is not the loop around the step",
    "left float64 3": "operand 3 is not the fold around the step",
    "fold float64 0 =5\nfolded float64 4,0 =0": r"step 0 \(argument\) is outside of the fold",
    "fold float64 0 =5": r"the end of step 4 \(fold\) is missing",
    "fold float32 0 =5": "the dtypes must be float64, float64",
    "fold float64 0 =6\nleft float64 4\nend int64 4": "operand 4 is not the loop around the step",
    "fold float64 0 =6\nleft float64 4\nnegative float64 4": r"step 4 \(fold\) cannot be read here",
    f"{LOOP}\nnegative float64 6": r"step 9 .*: step 6 \(add\) cannot be read here",
    f"{LOOP}\nnegative float64 4": r"step 9 .*: step 4 \(carried\) cannot be read here",
    f"{LOOP}\nnegative int64 7": r"step 9 .*: step 7 \(end\) cannot be read here",
    f"{LOOP}\nresult float64 0,7": "operands 0 and 7 are not a variable and the end of one loop",
    f"{LOOP}\nresult float64 4,6": "operands 4 and 6 are not a variable and the end of one loop",
    f"{LOOP}\nloop int64 3,1,4 =10\nend int64 9,4": "operand 4 is not a new variable of this loop",
    LOOP.replace("3,1,4 =7", "3,1,4,4 =7"): "operand 4 is not a new variable of this loop",
    LOOP.replace("end int64 5,6", "end int64 5"): "the dtypes must be int64, float64, int64, got int64",
    LOOP.replace("end int64 5,6", "end int64 5,1"): "the dtypes must be int64, float64, int64",
    LOOP.replace("add float64 4,2", "break bool 5,2,4"): "the dtypes must be int64, bool, float64, bool",
    LOOP.replace("add float64 4,2", "argument float64 =0"): "it must be outside of loops and folds",
    LOOP.replace("add float64 4,2", "index int64 =0"): "it must be outside of loops and folds",
    LOOP.replace("add float64 4,2", "reduce_sum float64 4"): "it must be outside of loops and folds",
    LOOP.replace("add float64 4,2", "loop int64 3,1,4 =8"): "operand 4 is not a new variable of this loop",
    f"{FOLD}\nnegative float64 5": r"step 8 .*: step 5 \(left\) cannot be read here",
    FOLD.replace("left float64 4", "load float64 3 =2"): "it must be outside of folds",
    FOLD.replace("left float64 4", "count int64"): "it must be outside of folds",
    FOLD.replace("left float64 4", "fold float64 2 =9"): "it must be outside of loops and folds",
    FOLD.replace("=1", "=1.0,2.0"): "float64 does not hold",
}


def test_the_parts_of_broken_texts_are_right() -> None:
    for steps, output in ((LOOP, 8), (FOLD, 7), ("load float64 3 =2", 4)):
        text = f"{HEAD.format(output)}{START}{steps}"
        made = decode_program(text)
        assert encode_program(made.program, made.arguments) == text


@pytest.mark.parametrize("steps", BROKEN)
def test_broken_steps_are_refused(steps: str) -> None:
    text = f"{HEAD.format('0')}{START}{steps}"
    with pytest.raises(ValueError, match=BROKEN[steps]) as caught:
        decode_program(text)
    if "names the" not in BROKEN[steps] and "encode_program" not in BROKEN[steps]:
        assert re.search(r"step \d+ \(", str(caught.value))


def _nested(count: int) -> str:
    lines = [f"loop int64 3,1 ={4 + 2 * count - 1 - number}" for number in range(count)]
    return "\n".join([*lines, *[f"end int64 {4 + number}" for number in reversed(range(count))]])


LINES = f"{HEAD.format('0')}{START}".rstrip("\n")
HEADERS: dict[str, str] = {
    "outputs=4": "result 4 is not a step",
    "outputs=-1": "result -1 is not a step",
    "outputs=": "a program must have a result, or store elements",
    "outputs=0,": "a program begins with its results",
    "results=0": "a program begins with its results",
    "outputs=0 axes=0 elements=0": "a program begins with its results",
    "outputs=0 elements=0": "must be all that its steps read",
    "outputs=0 elements=0,1": "encode_program",
    "outputs=0 elements=0,1,3": "elements must be numbers of the 3 arguments",
    "outputs=0 elements=1,0": "elements must be numbers of the 3 arguments",
    "outputs=0 elements=0,1,1": "elements must be numbers of the 3 arguments",
    "outputs=0 loads=": "must be all that its steps read",
    "outputs=0 loads=2:2": "must be all that its steps read",
    "outputs=0 loads=2:1,1:1": "loads must be numbers of the 3 arguments",
    "outputs=0 loads=2:1,3:1": "loads must be numbers of the 3 arguments",
    "outputs=0 loads=1:1,2:1": "argument 1 must be an array with 1 to 64 indices, got 1",
    "outputs=0 loads=0:0,2:1": "argument 0 must be an array with 1 to 64 indices, got 0",
    "outputs=0 loads=2": "a program begins with its results",
    "outputs=0 axes=0,0": "axes must be different, and from -64 to 63",
    "outputs=0 axes=64": "axes must be different, and from -64 to 63",
    "outputs=0 checked=x,y": "checked must name 3 arguments, got x, y",
    "outputs=0 checked=x,y,1z": "checked must name 3 arguments, got x, y, 1z",
}
REFUSED: dict[str, str] = {
    "": "a text must have a program, and at most one usual program, got 0",
    LINES.replace("\n\n", "\n"): "is not a valid DType|got 0",
    f"{LINES}\n\noutputs=0\nargument float64 =0\n\noutputs=0": "and at most one usual program, got 3",
    f"{LINES}\n\noutputs=0\nargument float64 =0": "the usual program must read the same arrays",
    f"{LINES}\n\noutputs=1\n{START}".rstrip("\n"): "the usual program must read the same arrays",
    LINES.replace("float64[]", "float63[]", 1): "'float63",
    LINES.replace("float64[]", "python float[]", 1): "'float",
    f"{LINES}\n{LOOP}".replace("outputs=0", "outputs=6"): r"step 6 \(add\) cannot be read here",
    f"{LINES}\n{LOOP}".replace("outputs=0", "outputs=4"): r"step 4 \(carried\) cannot be read here",
    f"{LINES}\n{_nested(65)}": r"step 68 \(loop int64 3,1 =69\): at most 64 loops may be in each other",
    f"{','.join(['float64'] * 4097)}\n\noutputs=0\nargument float64 =0": "at most 4096 arguments, got 4097",
    LINES + "\ncount int64" * (1 << 16): "at most 65536 steps, got 65540",
    LINES + " " * (1 << 22): "at most 4194304 characters",
}


@pytest.mark.parametrize("header", HEADERS)
def test_broken_headers_are_refused(header: str) -> None:
    with pytest.raises(ValueError, match=HEADERS[header]):
        decode_program(LINES.replace("outputs=0", header))


@pytest.mark.parametrize("text", REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_broken_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[text]):
        decode_program(text)


def test_many_loops_in_each_other_are_computed() -> None:
    made = decode_program(f"{LINES}\n{_nested(64)}").program
    loaded = {2: np.arange(2.0)}
    assert computed(made, [np.ones(()), np.int64(1), None], loaded) == computed(
        attrs.evolve(made, steps=made.steps[:4]), [np.ones(()), np.int64(1), None], loaded
    )


_WORDS = [
    *(
        "add",
        "less",
        "where",
        "constant",
        "argument",
        "index",
        "load",
        "store_max",
        "carried",
        "loop",
        "break",
    ),
    *("end", "result", "fold", "left", "folded", "reduce_sum", "reduce_argmin", "count", "cast"),
    *("bool", "float32", "int64", "complex64"),
]


def _mutated(text: str, draw: random.Random) -> str:
    """Change one or two tokens, lines or characters of a text."""
    for _ in range(draw.randint(1, 2)):
        parts = re.split(r"(\W)", text)
        places = [place for place, part in enumerate(parts) if part.strip()]
        place, kind = draw.choice(places), draw.randrange(6)
        if kind < 2 or (kind == 2 and parts[place].isdigit()):
            is_number = parts[place].isdigit()
            parts[place] = str(draw.randrange(14)) if is_number else draw.choice([*_WORDS, *parts])
            text = "".join(parts)
        elif kind < 4:
            lines = text.split("\n")
            one, other = draw.randrange(2, len(lines)), draw.randrange(2, len(lines))
            lines[one], lines[other] = (
                (lines[other], lines[one]) if kind == 2 else (lines[other], lines[other])
            )
            text = "\n".join(lines)
        elif kind == 4:
            text = text.replace(draw.choice(parts) or "0", draw.choice(parts), 1)
        else:
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice("0123456789,= \nab-.") * draw.randint(0, 1) + text[at + 1 :]
    return text


def _runs_long(program: TypedExpression) -> bool:
    """Return whether the iterations of a loop may be many, or are not known before it runs."""
    bounds = [
        program.steps[each] for step in program.steps if step.function == "loop" for each in step.steps[:2]
    ]
    return any(step.function not in ("argument", "constant") or abs(step.value) > 20 for step in bounds)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_changed_text_is_refused_or_means_a_program(name: str) -> None:
    sample, draw = SAMPLES[name], random.Random(name)
    text, meant = encode_program(sample.program, sample.arguments), 0
    for _ in range(2000):
        changed = _mutated(text, draw)
        try:
            made = decode_program.__wrapped__(changed)
        except ValueError:
            continue
        assert encode_program(made.program, made.arguments, made.usual) == changed
        meant += changed != text
        if not _runs_long(made.program):
            loaded = loaded_of(made.program.loads, made.arguments, 5)
            computed(made.program, values_of(made.arguments, 5), loaded)
    assert 20 < meant < 1000
