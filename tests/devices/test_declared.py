"""Declared operations: errors of declarations at import, and errors of all operations for a caller."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Literal

import broken_plans
import numpy as np
import outcome
import pytest
from isolations import inline

import trio_accel as ta
from trio_accel import fft, linalg, random, sparse
from trio_accel.actors import arguments_of
from trio_accel.backends.base import DType
from trio_accel.backends.base.contract.ops import KINDS, Item
from trio_accel.backends.base.kit import kernels
from trio_accel.backends.base.kit.checks import NATIVE
from trio_accel.backends.base.kit.kernels import kernel
from trio_accel.devices import (
    DECLARED,
    AccelRef,
    Declaration,
    LibraryActor,
    Operand,
    operation,
    operation_like,
)
from trio_accel.expressions import expression, like

_SIZES = {"c": 2, "k": 2, "m": 4, "n": 3}


class OwnActor(LibraryActor):
    library = "blas"


async def one(a: Operand) -> AccelRef: ...
async def two(a: Operand, b: Operand, side: Literal["L", "R"] = "L") -> AccelRef: ...
async def some(*a: Operand) -> AccelRef: ...
async def listed(a: Operand, places: list[int]) -> AccelRef: ...
async def no_array(a: int) -> AccelRef: ...


CONTRADICTIONS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a name that is not a parameter": (
        one,
        {"shapes": "b(n) -> out(n)"},
        "the shapes name 'b', which is not a parameter; there are a",
    ),
    "a parameter without shapes": (
        two,
        {"shapes": "a(n) -> out(n)"},
        "parameter 'b' is an array, and not in the shapes",
    ),
    "shapes of what is not an array": (
        no_array,
        {"shapes": "a(n) -> out(n)"},
        "parameter 'a' is in the shapes: annotate it as Operand or AccelRef",
    ),
    "a letter without a source": (one, {"shapes": "a(n) -> out(n, k)"}, "k"),
    "leading axes without a source": (one, {"shapes": "a(n) -> out(..., n)"}, r"\.\.\."),
    "no arrow": (one, {"shapes": "a(n)"}, "->"),
    "a dtype that is not there": (one, {"shapes": "a(n) -> out: float23(n)"}, "float23"),
    "a set of dtypes that no backend has": (
        one,
        {"shapes": "a(n) -> out(n)", "dtypes": ("float23",)},
        r"dtypes must be a tuple of DType.*'float23'",
    ),
    "no dtypes": (
        one,
        {"shapes": "a(n) -> out(n)", "dtypes": ()},
        "dtypes must name at least one dtype, or be left out, so that the kernels decide",
    ),
    "all arrays with dtypes of their own": (
        one,
        {"shapes": "a: int32(n) -> out(n)"},
        "no array on the left has the dtype",
    ),
    "neither shapes nor a plan": (one, {}, "either shapes or a plan"),
    "shapes and a plan": (one, {"shapes": "a(n) -> out(n)", "plan": print}, "either shapes or a plan"),
    "shapes by what is not a parameter": (
        one,
        {"shapes": {"x": "a(n) -> out(n)"}, "by": "mode"},
        "the shapes name 'mode', which is not a parameter",
    ),
    "a key of too many values": (
        two,
        {"shapes": {("L", 1): "a(n), b(n) -> out(n)"}, "by": "side"},
        "not one value for each of",
    ),
    "a letter of op() that is not a parameter": (
        one,
        {"shapes": "a^trans(m, n) -> out(m)"},
        "the shapes name 'trans'",
    ),
    "parameters without a number": (
        some,
        {"shapes": "a(n) -> out(n)"},
        "cannot be a field of a message; name each argument",
    ),
    "a parameter that says nothing": (
        listed,
        {"shapes": "a(n) -> out(n)"},
        "'places' has an annotation that does not say",
    ),
    "a specification of other fields": (
        one,
        {"shapes": "a(n) -> out(n)", "spec": lambda a, c: None},
        "takes 'c', which is neither a parameter nor a result",
    ),
}


@pytest.mark.parametrize(("function", "given", "text"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_declaration_that_contradicts_its_function(function: Any, given: dict[str, Any], text: str) -> None:
    before = dict(DECLARED)
    with pytest.raises(TypeError, match=text) as caught:
        operation(**{"actor": OwnActor, **given})(function)
    line = function.__code__.co_firstlineno
    assert str(caught.value).startswith(f"{__file__}:{line}: operation {function.__name__}: ")
    assert before == DECLARED


@pytest.fixture
def eighths() -> Iterator[Any]:
    """An operation declared for a dtype without a kernel."""
    declared: Any = operation("a(n) -> out(n)", actor=OwnActor, dtypes=(DType.float8_e5m2,))(one)
    yield declared
    for table in (DECLARED, kernels.ALLOWED):
        del table[declared.declaration.name]


class SinglesActor(LibraryActor):
    library = "blas"
    dtypes = (DType.float32,)


def test_the_dtypes_of_an_actor_match_its_operations() -> None:
    first: Any = operation("a(n) -> out(n)", actor=SinglesActor)(one)

    @operation_like(first, "a(n) -> out(n)", dtypes=(DType.float64,))
    def like_one() -> None:
        """Has another dtype."""

    second: Any = like_one
    try:
        assert first.declaration.dtypes == (DType.float32,)
        assert second.declaration.dtypes == (DType.float64,)
        assert second.declaration.library == first.declaration.library
        assert inspect.signature(second) == inspect.signature(first)
        assert second.__doc__ == "Has another dtype."
    finally:
        for name in (first.declaration.name, second.declaration.name):
            del DECLARED[name], kernels.ALLOWED[name]


def test_an_expression_like_another_one() -> None:
    @expression("y = x * factor", precision="float32")
    async def first(x: Any, factor: float = 2.0) -> AccelRef:
        """Multiply."""

    @like(first, "y = x + factor")
    def second() -> None:
        """Add."""

    @like(first, "x - factor", precision=None)
    def third() -> None:
        """Subtract."""

    declared: list[tuple[Any, str, str | None]] = [(second, "second", "float32"), (third, "third", None)]
    for made, name, precision in declared:
        assert (made.__name__, made.expression.precision) == (name, precision)
        assert inspect.signature(made) == inspect.signature(first)
        assert made.expression.operation.endswith(f".{name}")
    assert (second.__doc__, second.expression.text) == ("Add.", "y = x + factor")


def test_a_kernel_for_several_operations() -> None:
    def compute(spec: Any, call: Any) -> None: ...

    names = ("own.first", "own.second")
    kernel(*names, backend="cpu")(compute)
    assert set(kernels.kernels_of({"compute": compute}, "cpu")) == set(names)


async def test_a_function_with_the_arguments_of_another_one() -> None:
    async def other(x: int, y: int = 2, *, z: int = 3) -> tuple[object, ...]:
        return x, y, z

    async def run(first: str, **arguments: int) -> tuple[object, ...]:
        return first, arguments

    @arguments_of(other, run, "own")
    def own() -> None:
        """Runs itself."""

    assert await own(1, z=5) == ("own", {"x": 1, "y": 2, "z": 5})
    assert inspect.signature(own) == inspect.signature(other)
    with pytest.raises(TypeError, match="own: there is no option 'w'"):
        await own(1, w=5)


def test_a_kernel_without_a_dtype_of_its_declaration(eighths: Any) -> None:
    def compute(spec: Any, call: Any) -> None: ...

    line = compute.__code__.co_firstlineno
    for dtypes in ((DType.float32, DType.int8), {"a": (DType.float32, DType.int8)}):
        with pytest.raises(ValueError, match="no operation could run") as caught:
            kernels.kernel(eighths, backend="cpu", dtypes=dtypes)(compute)
        assert str(caught.value) == (
            f"{__file__}:{line}: dtypes: {eighths.declaration.name} is declared for float8_e5m2, and "
            f"{compute.__qualname__} for backend 'cpu' has float32, int8: no operation could run"
        )
    kernels.kernel(eighths, backend="cpu", dtypes=(DType.float8_e5m2, DType.int8))(compute)
    kernels.kernel(eighths, backend="cuda", dtypes={"out": (DType.float32,)})(compute)


def test_a_kernel_older_than_its_declaration(eighths: Any) -> None:
    declared, name = kernels.ALLOWED, eighths.declaration.name
    wanted = declared.pop(name)

    @kernels.kernel(name, backend="cpu", dtypes=(DType.float32,))
    def compute(spec: Any, call: Any) -> None: ...

    assert kernels.kernels_of({"compute": compute}, "cpu").keys() == {name}
    declared[name] = wanted
    line = compute.__code__.co_firstlineno
    with pytest.raises(ValueError, match=f"^{__file__}:{line}: dtypes: {name} is declared for float8_e5m2"):
        kernels.kernels_of({"compute": compute}, "cpu")
    assert kernels.kernels_of({"compute": compute}, "cuda") == {}


def _module(value: object) -> str:
    # One that refuses in its own name is at home where it is found; the one in it, where it is written.
    return getattr(inspect.unwrap(value), "__module__", None) or "" if callable(value) else ""


def test_all_of_the_package_is_declared() -> None:
    packages = {"fft": fft, "linalg": linalg, "sparse": sparse}
    functions = {f"{name}.{one}" for name, of in packages.items() for one in of.__all__ if one.islower()}
    # The other draws are made of these.
    draws = "bits uniform normal exponential lognormal integers rejected sequence_bits"
    functions |= {f"random.{name}" for name in draws.split()}
    assert all(hasattr(random.Generator, name) for name in draws.split()[:6])
    # These are made of others, or of expressions, or ask for nothing.
    made = (
        "linalg._composed",
        "linalg._contractions",
        "linalg._norms",
        "linalg._views",
        "fft._convolutions",
        "fft._fused",
        "fft._helpers",
        "fft._real",
        "sparse._conversions",
        "sparse._eigen",
        "sparse._elements",
        "sparse._iterations",
        "sparse._krylov",
    )
    for name, package in packages.items():
        functions -= {
            f"{name}.{one}" for one, value in vars(package).items() if _module(value).endswith(made)
        }
    functions -= {
        "linalg.cho_solve",
        "linalg.lstsq",
        "linalg.svdvals",
    }
    assert functions <= set(DECLARED)


def test_a_message_has_the_parameters_of_its_function() -> None:
    message: Any = linalg.cholesky.message
    assert message("a", upper=True).upper is True
    with pytest.raises(TypeError, match="unexpected keyword"):
        message("a", lower=True)


# Each operation, by the values of the parameters that its shapes depend on. Tests in tests/sparse cover the
# refusals of matrices with several arrays.
VARIANTS = [
    pytest.param(declared, key, id=f"{name}{'-' * bool(key)}{'-'.join(map(str, key))}")
    for name, declared in sorted(DECLARED.items())
    if not declared.declaration.arrays
    for key in declared.declaration.variants
]


def shape_of(item: Item) -> tuple[int, ...]:
    if item.stack == "*":
        return (4,)
    return tuple([dim if isinstance(dim, int) else _SIZES[str(dim)] for dim in item.dims])


def arguments(declaration: Declaration, key: tuple[object, ...]) -> dict[str, Any]:
    """Arguments that fit, with arrays of the host."""
    dtype = (declaration.dtypes or NATIVE)[0]
    given: dict[str, Any] = dict(zip(declaration.by, key, strict=True))
    for item in declaration.variants[key].inputs:
        array = np.ones(shape_of(item), item.dtype(dtype).dtype)
        if array.ndim == 2 and array.shape[0] == array.shape[1]:
            array += 3 * np.eye(len(array), dtype=array.dtype)
        given[item.name] = array if item.dtype(dtype) is not DType.int32 else np.zeros_like(array)
    for name, kind in declaration.parameters.items():
        values = {"bool": False, "whole": 1, "real": 1.0, "number": 1.0}
        if name == "beta" and "c" not in given and "y" not in given:
            given[name] = 0.0
        elif isinstance(kind, tuple):
            given.setdefault(name, kind[0])
        elif kind in values:
            given.setdefault(name, values[kind])
    if declaration.function == "solve_banded":
        # The matrix has two rows: the diagonals are the main one and the one below.
        given["u"] = 0
    return given


async def ask(device: ta.Device, function: Any, given: dict[str, Any]) -> Any:
    arrays = {
        name: await device.put(value) if isinstance(value, np.ndarray) else value
        for name, value in given.items()
    }
    before = (await device.statistics()).launched
    result = await outcome.acapture(device.ask, function.message(**arrays))
    refusal = getattr(result, "error", None)
    if isinstance(refusal, (TypeError, ValueError)) and not isinstance(refusal, ta.AccelError):
        # Refusals in the caller's task launch nothing.
        assert (await device.statistics()).launched == before
    return result.unwrap()


def changed(given: dict[str, Any], name: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    return {**given, name: change(given[name])}


@inline
@pytest.mark.parametrize(("function", "key"), VARIANTS)
async def test_each_declared_operation_refuses_invalid_arguments(
    device: ta.Device, function: Any, key: tuple[object, ...]
) -> None:
    declaration: Declaration = function.declaration
    given, line = arguments(declaration, key), declaration.variants[key]
    with suppress(ta.NotSupportedError, ta.LinAlgError):
        await ask(device, function, given)
    first = next(item for item in line.inputs if not item.kind)
    name = "".join(part.capitalize() for part in declaration.function.split("_"))
    if first.stack != "*":
        with pytest.raises(ValueError, match=rf"{name}: .*{first.name}.*(must|takes)"):
            await ask(device, function, changed(given, first.name, lambda a: np.ones((), a.dtype)))
    if declaration.dtypes:
        with pytest.raises(TypeError, match=rf"{name}: {first.name} has dtype int8; allowed: "):
            await ask(device, function, changed(given, first.name, lambda a: a.astype(np.int8)))
    same = [item.name for item in line.inputs if not item.kind]
    for other in same[1:]:
        with pytest.raises(TypeError, match=rf"{name}: operands must share a dtype"):
            await ask(device, function, changed(given, other, lambda a: a.astype(np.complex128)))
    for item in line.inputs:
        if item.kind and KINDS[item.kind](DType.float32) is not DType.float64:
            with pytest.raises(TypeError, match=rf"{name}: {item.name} has dtype float64; allowed: "):
                await ask(device, function, changed(given, item.name, lambda a: a.astype(np.float64)))
    for parameter, kind in declaration.parameters.items():
        if isinstance(kind, tuple):
            with pytest.raises(ValueError, match=rf"{name}: {parameter} must be .*, got 'nonsense'"):
                await ask(device, function, {**given, parameter: "nonsense"})
        elif kind == "bool":
            with pytest.raises(ValueError, match=rf"{name}: {parameter} must be False or True, got 'no'"):
                await ask(device, function, {**given, parameter: "no"})
        elif kind in ("real", "number"):
            with pytest.raises((TypeError, ValueError), match=parameter):
                await ask(device, function, {**given, parameter: "much"})


@pytest.mark.parametrize(
    "annotation",
    [Operand, "Operand", "devices.Operand", "ta.AccelRef", AccelRef, AccelRef | None, "Operand | None"],
    ids=str,
)
def test_annotations_of_arrays(annotation: Any) -> None:
    async def own(a: Any) -> Any: ...

    own.__annotations__["a"] = annotation
    try:
        declared = operation("a(n) -> out(n)", actor=OwnActor)(own)
        assert declared.declaration.parameters == {"a": "array"}
    finally:
        DECLARED.pop("test_declared.own", None)


@pytest.mark.parametrize("module", ["__main__", "_ops", "_pk._ops"])
def test_a_module_without_a_public_name_is_refused(module: str) -> None:
    async def own(a: Operand) -> AccelRef: ...

    own.__module__ = module
    with pytest.raises(
        TypeError, match=rf"test_declared.py:\d+: operation own: it is declared in module '{module}'"
    ):
        operation("a(n) -> out(n)", actor=OwnActor)(own)


async def test_a_failing_plan_is_reported_with_its_kernel(device: ta.Device) -> None:
    """Also from a worker: a plan cannot be tried at import."""
    with pytest.raises(Exception, match="a plan that is broken") as caught:
        await broken_plans.planned(await device.put(np.ones(3)))
    errors: list[BaseException | None] = [caught.value]
    while errors[-1] is not None:
        errors.append(errors[-1].__cause__)
    notes = [note for error in errors for note in getattr(error, "__notes__", ())]
    code = broken_plans.compute.__code__
    where = f"{code.co_filename}:{code.co_firstlineno}"
    assert f"in the plan of the kernel of broken_plans.planned at {where}" in notes
    await device.put(np.ones(3))
