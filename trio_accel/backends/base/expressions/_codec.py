"""Programs as texts, which messages hold.

The first line of a text lists the arguments. A block follows for the program, and another one for
`EncodedProgram.usual` if there is one. The first line of a block lists the results, and each later line has a
step: its function, dtype, operands and value. For example, ``sqrt(x * a)`` is:

    float64[],python float

    outputs=3
    argument float64 =0
    argument float64 =1
    multiply float64 0,1
    sqrt float64 2

Equal programs have equal texts, so executors use the text as the key of everything that they make. Decoding
checks whatever executors rely on, because the text comes from another process. It cannot check shapes,
because the arrays are in the operation's specification.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import attrs
import numpy as np

from ..contract.dtypes import DType, Ints
from ..contract.ops import real_of
from ..contract.values import number_array
from ._arguments import Argument
from ._expression import COMBINED, FUNCTIONS
from ._steps import TypedExpression, TypedStep, needed_steps

__all__ = ["EncodedProgram", "decode_program", "encode_program"]

# The parser takes 10 000 characters, of which the typist makes fewer steps. Each derivative of a program
# has about twice as many.
_MAX_STEPS = 1 << 16
_MAX_CHARACTERS = 64 * _MAX_STEPS
# The parser takes 3 loops in each other, and a derivative adds one. Executors call themselves for each.
_MAX_LOOPS = 64
# A GPU takes 4096 bytes of arguments. NumPy takes any number.
_MAX_ARGUMENTS = 4096
# NumPy's limit, which the status words of kernels share.
_MAX_AXES = 64

_FUNCTIONS = {
    function.name: function
    for function in FUNCTIONS.values()
    if function.rule not in ("cast", "clip", "angle")
}
_LOW = (DType.float8_e4m3fn, DType.float8_e5m2)
_STORES = frozenset(f"store_{name}" for name in ("set", "add", "multiply", "min", "max"))
_ORDERED = frozenset(f"reduce_{name}" for name in ("min", "max", "nanmin", "nanmax", "argmin", "argmax"))
_REDUCTIONS = _ORDERED | {f"reduce_{name}" for name in COMBINED}
# The dtypes of operands and result, by letters: bool (b), int64 (i), int64 for each index (k), and the dtypes
# of the argument (a), the step (s), variables (v), and the first operand (x).
_DTYPES: dict[str, str] = {
    "constant": "s",
    "argument": "a",
    "index": "i",
    "count": "i",
    "cast": "xs",
    "load": "ka",
    "loop": "iivi",
    "break": "ibvb",
    "end": "ivi",
    "result": "xix",
    "folded": "xxx",
    **dict.fromkeys((*_REDUCTIONS, "carried", "fold", "left", "right"), "xx"),
    **dict.fromkeys(("reduce_any", "reduce_all"), "bb"),
    **dict.fromkeys(("reduce_argmin", "reduce_argmax"), "xi"),
    **dict.fromkeys(_STORES, "aka"),
}
# The least and the largest number of operands.
_MAX_OPERANDS = _MAX_STEPS
_OPERANDS: dict[str, tuple[int, int]] = {
    **{name: (function.arity, function.arity) for name, function in _FUNCTIONS.items()},
    **dict.fromkeys(("argument", "constant", "index", "count"), (0, 0)),
    **dict.fromkeys((*_REDUCTIONS, "cast", "carried", "fold", "left", "right"), (1, 1)),
    **dict.fromkeys(_STORES, (2, 1 + _MAX_AXES)),
    "load": (1, _MAX_AXES),
    "loop": (2, _MAX_OPERANDS),
    "break": (2, _MAX_OPERANDS),
    "end": (1, _MAX_OPERANDS),
    "result": (2, 2),
    "folded": (2, 2),
}
# These steps have a `TypedStep.value`.
_VALUED = _STORES | {"argument", "constant", "index", "load", "loop", "fold", "folded"}
# The first operand of these steps is the loop or fold around them.
_AROUND = {"break": "loop", "end": "loop", "left": "fold", "right": "fold", "folded": "fold"}
_OF_ARGUMENTS = _STORES | {"argument", "load"}
# If elements leave a loop one by one, NumPy computes the others only, and these steps have all elements.
_OUTSIDE_OF_LOOPS = _REDUCTIONS | {"argument", "index", "fold"}
_OUTSIDE_OF_FOLDS = _STORES | {"load", "count"}
_WITHOUT_VALUE = _STORES | {"break", "end", "fold"}

_INTS = r"(?:-?\d+(?:,-?\d+)*)?"
_PAIRS = r"(?:\d+:\d+(?:,\d+:\d+)*)?"
_STEP = re.compile(r"(\w+) (\w+)(?: (\d+(?:,\d+)*))?(?: =(\S+))?", re.ASCII)
_HEADER = re.compile(
    rf"outputs=({_INTS})(?: elements=({_INTS}))?(?: axes=({_INTS}))?(?: loads=({_PAIRS}))?"
    r"(?: checked=(\S*))?",
    re.ASCII,
)
_NAN = struct.Struct(">d")
_USUAL_NAN = _NAN.pack(math.nan)

_Reads: TypeAlias = tuple[Ints, Ints, tuple[tuple[int, int], ...]]


@attrs.frozen
class EncodedProgram:
    """A program with the form in which it gets its arguments.

    Attributes:
        program: The program.
        arguments: How it gets its arguments.
        usual: A program that makes the same in less time if none of its steps over- or underflows; None if
            there is none.
    """

    program: TypedExpression
    arguments: tuple[Argument, ...]
    usual: TypedExpression | None = None

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether the steps of the result read elements otherwise than by reductions."""
        steps, arguments = self.program.steps, self.arguments
        return any(
            step.function in ("index", "load")
            or (step.function == "argument" and arguments[int(step.value.real)].is_array)
            for step in [steps[number] for number in needed_steps(steps, self.program.outputs)]
        )

    @functools.cached_property
    def is_one_reduction(self) -> bool:
        """Whether a reduction makes the only result, which reads no other elements."""
        is_one = len(self.program.reductions) == len(self.program.outputs) == 1
        return is_one and not self.is_whole


def encode_program(
    program: TypedExpression, arguments: Sequence[Argument], usual: TypedExpression | None = None
) -> str:
    """Return a program as a text, without its `bounds`, which only the sender checks.

    Args:
        program: The program.
        arguments: How it gets its arguments.
        usual: See `EncodedProgram.usual`.
    """
    blocks = [_block(variant) for variant in (program, usual) if variant is not None]
    return "\n\n".join([",".join([argument.encode() for argument in arguments]), *blocks])


@functools.lru_cache(1024)
def decode_program(text: str) -> EncodedProgram:
    """Decode a text of `encode_program`.

    Raises:
        ValueError: The text is not of a program that executors can compute; the message names the step.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"a program has at most {_MAX_CHARACTERS} characters, got {len(text)}")
    first, *blocks = text.split("\n\n")
    arguments = tuple(map(Argument.decode, first.split(","))) if first else ()
    if len(arguments) > _MAX_ARGUMENTS:
        raise ValueError(f"a program has at most {_MAX_ARGUMENTS} arguments, got {len(arguments)}")
    if len(blocks) not in (1, 2):
        raise ValueError(f"a text must have a program, and at most one usual program, got {len(blocks)}")
    program, *usual_programs = [_program(block, arguments) for block in blocks]
    for usual in usual_programs:
        if _form(usual) != _form(program):
            raise ValueError(
                "the usual program must read the same arrays, and have results of the same dtypes"
            )
    if encode_program(program, arguments, *usual_programs) != text:
        raise ValueError(
            "a number, or a part that follows from the steps, is not written as encode_program does"
        )
    return EncodedProgram(program, arguments, *usual_programs)


def _form(program: TypedExpression) -> tuple[object, ...]:
    return program.elements, program.loads, program.dtypes


def _block(program: TypedExpression) -> str:
    """Return the lines of a program."""
    words = [f"outputs={_listed(program.outputs)}"]
    mine = _words_of((program.elements, program.axes, program.loads))
    # A program may have arguments that a dead step has read.
    words += [
        word
        for word, derived in zip(mine, _words_of(_reads_of(program.steps)), strict=True)
        if word != derived
    ]
    if program.checked:
        words.append(f"checked={','.join(program.checked)}")
    lines = [" ".join(words)]
    for step in program.steps:
        line = f"{step.function} {step.dtype.value}"
        if step.steps:
            line += f" {_listed(step.steps)}"
        if step.function in _VALUED or step.value:
            line += f" ={_number_text(step.value)}"
        lines.append(line)
    return "\n".join(lines)


def _words_of(reads: _Reads) -> list[str]:
    elements, axes, loads = reads
    pairs = ",".join([f"{number}:{count}" for number, count in loads])
    return [f"elements={_listed(elements)}", f"axes={_listed(axes)}", f"loads={pairs}"]


def _reads_of(steps: Sequence[TypedStep]) -> _Reads:
    """Return the elements, axes and loads of a program that reads no more than its steps do."""
    elements, axes, loads = set[int](), dict[int, None](), dict[int, int]()
    for step in steps:
        number = int(step.value.real) if step.function in _OF_ARGUMENTS or step.function == "index" else 0
        if step.function == "argument":
            elements.add(number)
        elif step.function == "index":
            axes[number] = None
        elif step.function in _OF_ARGUMENTS:
            loads[number] = len(step.indices)
    return tuple(sorted(elements)), tuple(axes), tuple(sorted(loads.items()))


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _ints(text: str) -> Ints:
    return tuple(map(int, text.split(","))) if text else ()


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    numbers = _ints(text.replace(":", ","))
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def _number_text(value: Any) -> str:
    """Return a number of Python's as a text that keeps its kind and all of its bits."""
    plain: Any = cast("Any", value).item() if isinstance(value, np.generic) else value
    if isinstance(plain, complex):
        return f"{_number_text(plain.real)},{_number_text(plain.imag)}"
    if isinstance(plain, float) and math.isnan(plain) and _NAN.pack(plain) != _USUAL_NAN:
        return f"nan:{_NAN.pack(plain).hex()}"
    return repr(plain)


def _number(text: str) -> complex:
    """Decode a text of `_number_text`."""
    if text in ("True", "False"):
        return text == "True"
    if text.lstrip("-").isdecimal():
        return int(text)
    real, *imaginary = map(_float, text.split(",", 1))
    return complex(real, *imaginary) if imaginary else real


def _float(text: str) -> float:
    try:
        is_nan = text.startswith("nan:")
        return cast("float", _NAN.unpack(bytes.fromhex(text[4:]))[0]) if is_nan else float(text)
    except (ValueError, struct.error):
        raise ValueError(f"{text} is not a number") from None


def _program(text: str, arguments: Sequence[Argument]) -> TypedExpression:
    """Decode the lines of a program."""
    header, *lines = text.split("\n")
    match = _HEADER.fullmatch(header)
    if match is None:
        raise ValueError(f"a program begins with its results, got {header[:80]!r}")
    if len(lines) > _MAX_STEPS:
        raise ValueError(f"a program has at most {_MAX_STEPS} steps, got {len(lines)}")
    checker = _Checker(arguments)
    for number, line in enumerate(lines):
        try:
            checker.add(_step(line))
        except ValueError as error:
            raise ValueError(f"step {number} ({line[:80]}): {error}") from None
    derived = _reads_of(checker.steps)
    program = TypedExpression(
        tuple(checker.steps),
        outputs=_ints(match[1]),
        elements=derived[0] if match[2] is None else _ints(match[2]),
        axes=derived[1] if match[3] is None else _ints(match[3]),
        loads=derived[2] if match[4] is None else _pairs(match[4]),
        checked=() if match[5] is None else tuple(match[5].split(",")),
    )
    _check_reads(program, derived, arguments)
    checker.check_results(program.outputs)
    return program


def _step(line: str) -> TypedStep:
    match = _STEP.fullmatch(line)
    if match is None:
        raise ValueError("a step has a function, a dtype, operands, and perhaps a value")
    value = 0 if match[4] is None else _number(match[4])
    return TypedStep(match[1], DType(match[2]), _ints(match[3] or ""), value)


def _check_reads(program: TypedExpression, derived: _Reads, arguments: Sequence[Argument]) -> None:
    """Require that a program lists at least the arguments and axes that its steps read."""
    elements, axes, loads = program.elements, program.axes, program.loads
    numbers = tuple(number for number, _ in loads)
    for name, mine in (("elements", elements), ("loads", numbers)):
        if list(mine) != sorted({*mine} & {*range(len(arguments))}):
            raise ValueError(f"{name} must be numbers of the {len(arguments)} arguments in order, got {mine}")
    if not {*elements} >= {*derived[0]} or not {*axes} >= {*derived[1]} or not {*loads} >= {*derived[2]}:
        raise ValueError("the arguments and axes that a program lists must be all that its steps read")
    if len({*axes}) < len(axes) or not all(-_MAX_AXES <= axis < _MAX_AXES for axis in axes):
        raise ValueError(f"axes must be different, and from {-_MAX_AXES} to {_MAX_AXES - 1}, got {axes}")
    for number, count in loads:
        if not arguments[number].is_array or not 1 <= count <= _MAX_AXES:
            raise ValueError(f"argument {number} must be an array with 1 to {_MAX_AXES} indices, got {count}")
    names = program.checked
    if names and (len(names) != len(arguments) or not all(name.isidentifier() for name in names if name)):
        raise ValueError(f"checked must name {len(arguments)} arguments, got {', '.join(names)}")


class _Checker:
    """Checks steps one after another.

    Args:
        arguments: How the program gets its arguments.

    Attributes:
        steps: The steps so far.
    """

    def __init__(self, arguments: Sequence[Argument]) -> None:
        self.steps: list[TypedStep] = []
        self._arguments = arguments
        # The innermost loop or fold around each step, and the open loops and folds; -1 is the program.
        self._homes, self._open = list[int](), [-1]
        # The loops of variables.
        self._loops: dict[int, int] = {}
        # The number of indices for each loaded argument.
        self._loads: dict[int, int] = {}
        # Constants, and steps computed from constants. A fold may read them.
        self._fixed = set[int]()

    def add(self, step: TypedStep) -> None:
        """Check the next step.

        Raises:
            ValueError: An executor cannot compute it.
        """
        number, function = len(self.steps), step.function
        minimum, maximum = _OPERANDS.get(function, (0, -1))
        if maximum < 0:
            raise ValueError(f"unknown function {function}")
        if not minimum <= len(step.steps) <= maximum:
            raise ValueError(
                f"it must have {minimum} operands{' or more' * (maximum > minimum)}, got {len(step.steps)}"
            )
        forward = [operand for operand in step.steps if operand >= number]
        if forward:
            raise ValueError(f"operand {forward[0]} is not an earlier step")
        self._check_place(function)
        self._check_operands(step)
        self._check_value(step)
        self._check_dtypes(step)
        if function in ("loop", "fold"):
            self._open.append(number)
            self._loops.update(dict.fromkeys(step.steps[2:], number))
        elif function in ("end", "folded"):
            begin = self._open.pop()
            if self.steps[begin].value != number:
                raise ValueError(f"step {begin} names {self.steps[begin].value} as its end")
        elif function in _FUNCTIONS or function in ("constant", "cast"):
            self._fixed.update([number] if self._fixed.issuperset(step.steps) else [])
        self._homes.append(self._open[-1])
        self.steps.append(step)

    def check_results(self, outputs: Sequence[int]) -> None:
        """Require that the program is complete."""
        if len(self._open) > 1:
            begin = self._open[-1]
            raise ValueError(f"the end of step {begin} ({self.steps[begin].function}) is missing")
        if not outputs and not any(step.function in _STORES for step in self.steps):
            raise ValueError("a program must have a result, or store elements")
        for number in outputs:
            if not 0 <= number < len(self.steps):
                raise ValueError(f"result {number} is not a step")
            self._check_read(number)

    def _check_place(self, function: str) -> None:
        """Check which loops or folds a step is in."""
        is_in_fold = len(self._open) > 1 and self.steps[self._open[1]].function == "fold"
        if function in _OUTSIDE_OF_LOOPS and len(self._open) > 1:
            raise ValueError("it must be outside of loops and folds")
        if function in _OUTSIDE_OF_FOLDS and is_in_fold:
            raise ValueError("it must be outside of folds")
        if function == "loop" and len(self._open) > _MAX_LOOPS:
            raise ValueError(f"at most {_MAX_LOOPS} loops may be in each other")

    def _check_operands(self, step: TypedStep) -> None:
        """Check that the operands have values where the step is."""
        read: Sequence[int] = step.steps
        if kind := _AROUND.get(step.function):
            begin, *read = step.steps
            around = self._open if step.function in ("left", "right") else self._open[-1:]
            if begin not in around or self.steps[begin].function != kind:
                raise ValueError(f"operand {begin} is not the {kind} around the step")
        elif step.function == "loop":
            read = step.steps[:2]
            for position, operand in enumerate(step.steps[2:], 2):
                is_new = operand not in self._loops and operand not in step.steps[2:position]
                if (
                    self.steps[operand].function != "carried"
                    or self._homes[operand] != self._open[-1]
                    or not is_new
                ):
                    raise ValueError(f"operand {operand} is not a new variable of this loop")
        elif step.function == "result":
            variable, end = step.steps
            is_end = self.steps[end].function == "end" and self._homes[end] in self._open
            if not is_end or self._loops.get(variable) != self.steps[end].steps[0]:
                raise ValueError(f"operands {variable} and {end} are not a variable and the end of one loop")
            read = ()
        for operand in read:
            self._check_read(operand)

    def _check_read(self, number: int) -> None:
        """Check that a step has a value for the next step, or for the program."""
        function = self.steps[number].function
        home = self._loops.get(number) if function == "carried" else self._homes[number]
        if home not in self._open or function in _WITHOUT_VALUE:
            raise ValueError(f"step {number} ({function}) cannot be read here")
        fold = self._open[1] if len(self._open) > 1 else 0
        if number < fold and self.steps[fold].function == "fold" and number not in self._fixed:
            raise ValueError(f"step {number} ({function}) is outside of the fold, and not made of constants")

    def _check_value(self, step: TypedStep) -> None:
        value, function = step.value, step.function
        if function in ("constant", "folded"):
            _check_held(value, step.dtype)
        elif type(value) is not int or (value and function not in _VALUED):
            raise ValueError(f"its value must be {'an integer' if function in _VALUED else 0}, got {value}")
        elif function == "index" and not -_MAX_AXES <= value < _MAX_AXES:
            raise ValueError(f"an axis must be from {-_MAX_AXES} to {_MAX_AXES - 1}, got {value}")
        elif function in _OF_ARGUMENTS:
            if not 0 <= value < len(self._arguments):
                raise ValueError(f"argument {value} is not among the {len(self._arguments)} arguments")
            count = len(step.indices)
            if function != "argument" and not self._arguments[value].is_array:
                raise ValueError(
                    f"argument {value} is a number, and only an array has elements to load or store"
                )
            if function != "argument" and self._loads.setdefault(value, count) != count:
                raise ValueError(f"argument {value} has {self._loads[value]} indices in an earlier step")

    def _check_dtypes(self, step: TypedStep) -> None:
        function, operand_dtypes = step.function, tuple(self.steps[operand].dtype for operand in step.steps)
        if step.dtype in _LOW:
            raise ValueError(f"expressions do not compute with {step.dtype}")
        is_complex = bool(operand_dtypes) and operand_dtypes[0].kind == "complex"
        is_cut = function == "cast" and is_complex and step.dtype.kind not in ("complex", "bool")
        if is_cut or (function in _ORDERED and is_complex):
            raise ValueError(f"{function} does not make {step.dtype} of {_names(operand_dtypes)}")
        expected = (
            self._expected_dtypes(step, operand_dtypes)
            if function in _DTYPES
            else _of_function(function, operand_dtypes)
        )
        if expected is None:
            raise ValueError(f"{function} does not take {_names(operand_dtypes)}")
        if expected != (*operand_dtypes, step.dtype):
            raise ValueError(
                f"the dtypes must be {_names(expected)}, got {_names((*operand_dtypes, step.dtype))}"
            )

    def _expected_dtypes(self, step: TypedStep, operand_dtypes: Sequence[DType]) -> tuple[DType, ...]:
        """Return the dtypes that the operands of a step, and the step itself, must have."""
        is_loop = step.function in ("break", "end")
        variables = self.steps[step.steps[0]].steps[2:] if is_loop else step.steps[2:]
        is_argument = step.function in _OF_ARGUMENTS
        letter_dtypes = {
            "a": [self._arguments[int(step.value.real)].dtype] if is_argument else [],
            "b": [DType.bool],
            "i": [DType.int64],
            "k": [DType.int64] * len(step.indices),
            "s": [step.dtype],
            "v": [self.steps[variable].dtype for variable in variables],
            "x": operand_dtypes[:1],
        }
        return tuple(dtype for letter in _DTYPES[step.function] for dtype in letter_dtypes[letter])


@functools.lru_cache(4096)
def _of_function(name: str, operand_dtypes: tuple[DType, ...]) -> tuple[DType, ...] | None:
    """Return the dtypes of operands and result, or None if the function does not take these operands."""
    function, first = _FUNCTIONS[name], operand_dtypes[0]
    if function.rule == "where":
        return DType.bool, operand_dtypes[1], operand_dtypes[1], operand_dtypes[1]
    if function.rule == "part":
        return (first, real_of(first)) if first.kind == "complex" else None
    if any(dtype.kind not in function.kinds for dtype in operand_dtypes):
        return None
    try:
        resolved = function.ufunc.resolve_dtypes((*[dtype.dtype for dtype in operand_dtypes], None))
    except TypeError:
        return None
    return tuple(map(DType.of, resolved))


def _check_held(value: complex, dtype: DType) -> None:
    """Require that a dtype holds a number; a fraction is cut, and a large floating number is infinite."""
    is_held = not isinstance(value, int) or -(1 << 63) <= value < 1 << 64
    try:
        with np.errstate(all="ignore"):
            number_array(value, dtype)
    except (TypeError, ValueError, OverflowError):
        is_held = False
    if not is_held:
        raise ValueError(f"{dtype} does not hold {value}")


def _names(dtypes: Sequence[DType]) -> str:
    return ", ".join(map(str, dtypes)) or "nothing"
