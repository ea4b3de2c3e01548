"""Specifications and small arrays that cross to another process."""

from __future__ import annotations

import enum
import math
import pickle
import pickletools
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trio_accel import linalg
from trio_accel.backends.base import DType, ops
from trio_accel.backends.base.contract.ops import ArraySpec, OperationSpec, reads, writes
from trio_accel.devices.wire._specs import decode_array, decode_spec, encode_array, encode_spec

pytestmark = pytest.mark.no_device

SPECS = sorted(
    (value for value in vars(ops).values() if isinstance(value, type) and issubclass(value, OperationSpec)),
    key=lambda cls: cls.__name__,
)
SPECS.remove(OperationSpec)

ARRAYS = st.builds(
    ArraySpec,
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.sampled_from(DType),
    st.lists(st.integers(0, 2**33), max_size=4).map(tuple),
    st.lists(st.integers(-(2**33), 2**33), max_size=4).map(tuple),
)
NUMBERS = st.one_of(
    st.booleans(), st.integers(), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False)
)
HOSTS = hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, min_side=0), elements=st.floats(-1, 1, width=32))


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values for a field of a specification."""
    if hint is ArraySpec:
        return ARRAYS
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple:
        return st.lists(st.integers(), max_size=3).map(tuple)
    if hint in (int, float):
        return st.from_type(hint) if hint is int else st.floats(allow_nan=False)
    if get_origin(hint) is np.ndarray:
        return HOSTS
    return NUMBERS


@st.composite
def specs(draw: st.DrawFn) -> OperationSpec:
    cls: Callable[..., OperationSpec] = draw(st.sampled_from(SPECS))
    hints = get_type_hints(cls)
    return cls(
        **{
            field.alias: draw(values(hints[field.name]))
            for field in attrs.fields(cls)  # type: ignore[arg-type]
            if field.init
        }
    )


def across(spec: OperationSpec) -> OperationSpec:
    """Send a specification through the pickler, with its host arrays by value."""
    data = pickle.dumps(encode_spec(spec, encode_array), 5)
    # Nothing in it is imported or called when it is read.
    names = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert names.isdisjoint({"GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD"})
    return decode_spec(pickle.loads(data), decode_array)


def same(left: OperationSpec, right: OperationSpec) -> None:
    assert type(left) is type(right)
    for field in attrs.fields(type(left)):  # type: ignore[arg-type]
        # Fields that are not given belong to the process.
        if not field.init:
            continue
        one, other = getattr(left, field.name), getattr(right, field.name)
        assert type(one) is type(other)
        if isinstance(one, np.ndarray):
            bit_for_bit(one, other)
        else:
            assert one == other


def bit_for_bit(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> None:
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert left.tobytes() == right.tobytes()


ARRAY = ArraySpec(3, 256, DType.bfloat16, (4, 5), (10, 2))


class Color(enum.Enum):
    RED = "red"
    PAIR = (1, ("x", None))


class Level(enum.IntEnum):
    HIGH = 2


class Flags(enum.Flag):
    A = 1
    B = 2


@attrs.frozen
class UserSpec(OperationSpec):
    """A field that somebody else's library might need."""

    source: ArraySpec = reads()  # noqa: RUF009 - a field specifier
    anything: object = None
    _private: int = 7
    derived: object = attrs.field(init=False, factory=list)
    out: ArraySpec = attrs.field(default=ARRAY, kw_only=True)
    _keyword: str = attrs.field(default="k", kw_only=True, alias="called")

    class Nested(enum.Enum):
        ONE = 1


@attrs.frozen
class Unrelated(ArraySpec):
    """No `ArraySpec`, strictly."""


class Bare(OperationSpec):
    """Not an attrs class."""


class TestSpecs:
    @settings(deadline=None)
    @given(spec=specs())
    def test_every_specification_of_the_package_is_equal_after_the_crossing(
        self, spec: OperationSpec
    ) -> None:
        same(across(spec), spec)

    def test_all_are_known_to_this_test(self) -> None:
        assert len(SPECS) >= 13
        assert ops.MatmulSpec in SPECS

    @pytest.mark.parametrize(
        "value",
        [
            None,
            True,
            -(2**80),
            math.inf,
            -0.0,
            1 - 2j,
            complex(-0.0, math.inf),
            "text\udc80",
            b"\0bytes",
            (),
            (1, ("two", (3.0, None)), ()),
            (0, "looks like a tuple that crossed"),
            DType.float8_e5m2,
            ARRAY,
            (ARRAY, (ARRAY, DType.bool)),
            Color.RED,
            Color.PAIR,
            Level.HIGH,
            Flags.A | Flags.B,
            UserSpec.Nested.ONE,
            (Color.RED, Level.HIGH),
        ],
        ids=repr,
    )
    def test_a_user_s_own_with_values_of_every_kind(self, value: object) -> None:
        spec = UserSpec(ARRAY, value, 8, out=ARRAY, called="c")
        got = across(spec)
        same(got, spec)
        assert isinstance(got, UserSpec)
        assert repr(got.anything) == repr(value)

    @pytest.mark.parametrize(
        ("value", "plain"),
        [
            (np.float64(1.5), 1.5),
            (np.int8(-3), -3),
            (np.uint64(2**64 - 1), 2**64 - 1),
            (np.bool_(True), True),
            (np.complex64(1j), 1j),
            (np.str_("s"), "s"),
            (np.bytes_(b"b"), b"b"),
            (DType.bfloat16.dtype.type(0.5), 0.5),
            ((np.float32(0.1),), (float(np.float32(0.1)),)),
        ],
        ids=repr,
    )
    def test_numpy_s_scalars_become_numbers(self, value: object, plain: object) -> None:
        got = across(UserSpec(ARRAY, value))
        assert isinstance(got, UserSpec)
        assert got.anything == plain
        assert type(got.anything) is type(plain)

    def test_extents_that_came_from_numpy_become_integers(self) -> None:
        spec = ArraySpec(
            np.int64(1), np.int64(2), DType.int8, tuple(np.array([3, 4])), tuple(np.array([4, 1]))
        )  # type: ignore[arg-type]
        got = across(linalg.scal.spec(2, spec))
        assert got.outputs() == (ArraySpec(1, 2, DType.int8, (3, 4), (4, 1)),)
        assert {type(extent) for extent in got.outputs()[0].shape} == {int}

    def test_host_arrays_are_sent_as_requested(self) -> None:
        first, second = np.arange(3.0), np.arange(4.0)
        hosts: list[npt.NDArray[Any]] = []

        def send(array: npt.NDArray[Any]) -> object:
            hosts.append(array)
            return "host", len(hosts) - 1

        def find(data: tuple[str, int]) -> npt.NDArray[Any]:
            assert data[0] == "host"
            return hosts[data[1]]

        got = decode_spec(encode_spec(ops.CopyToHostSpec(first, ARRAY), send), find)
        assert isinstance(got, ops.CopyToHostSpec)
        assert got.host is first
        assert got.source == ARRAY
        nested = decode_spec(encode_spec(UserSpec(ARRAY, (1, second)), send), find)
        assert isinstance(nested, UserSpec)
        assert nested.anything == (1, second)  # the same object, so not compared by element

    def test_another_process_imports_the_class(self) -> None:
        data = encode_spec(ops.FillSpec(2**60 + 1, ARRAY), encode_array)
        program = (
            "import pickle, sys\n"
            "from trio_accel.devices.wire._specs import decode_array, decode_spec\n"
            "print(decode_spec(pickle.load(sys.stdin.buffer), decode_array))"
        )
        result = subprocess.run(
            [sys.executable, "-c", program], input=pickle.dumps(data), capture_output=True, check=True
        )
        assert result.stdout.decode().strip() == repr(ops.FillSpec(2**60 + 1, ARRAY))


class TestRefusals:
    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            ([1, 2], r"\[1, 2\]"),
            ({"a": 1}, "{'a': 1}"),
            ((1, {2}), r"\(1, \{2\}\)"),
            (object(), "object object"),
            (Unrelated(*attrs.astuple(ARRAY, recurse=False)), "Unrelated"),
            (bytearray(b"x"), "bytearray"),
            (np.longdouble(1), "longdouble"),
            (np.datetime64(1, "s"), "datetime64"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_an_unsendable_value_is_named_with_its_field(self, value: object, shown: str) -> None:
        with pytest.raises(TypeError, match=rf"crosses to a worker holds .*UserSpec\.anything is .*{shown}"):
            encode_spec(UserSpec(ARRAY, value), encode_array)

    def test_a_value_without_a_repr(self) -> None:
        class Rude:
            def __repr__(self) -> str:
                raise RuntimeError

        with pytest.raises(TypeError, match=r"UserSpec\.anything is <Rude"):
            encode_spec(UserSpec(ARRAY, Rude()), encode_array)

    def test_classes_inside_functions(self) -> None:
        @attrs.frozen
        class Local(OperationSpec):
            out: ArraySpec = writes()  # noqa: RUF009 - a field specifier

        class Hidden(enum.Enum):
            A = 1

        with pytest.raises(TypeError, match=r"Local is defined in a function; move it"):
            encode_spec(Local(ARRAY), encode_array)
        with pytest.raises(TypeError, match=r"UserSpec\.anything is .*Hidden is defined in a function"):
            encode_spec(UserSpec(ARRAY, Hidden.A), encode_array)

    def test_classes_of_the_main_program(self, monkeypatch: pytest.MonkeyPatch) -> None:
        @attrs.frozen
        class Script(OperationSpec):
            out: ArraySpec = writes()  # noqa: RUF009 - a field specifier

        Script.__qualname__, Script.__module__ = "Script", "__main__"
        monkeypatch.setattr(sys.modules["__main__"], "Script", Script, raising=False)
        with pytest.raises(
            TypeError, match=r"__main__\.Script is defined in __main__, .*; move it to a module"
        ):
            encode_spec(Script(ARRAY), encode_array)

    def test_classes_not_found_under_their_name(self) -> None:
        replaced = attrs.make_class("UserSpec", ["x"], bases=(OperationSpec,), frozen=True)
        replaced.__module__ = UserSpec.__module__
        with pytest.raises(TypeError, match="not what its module has under this name"):
            encode_spec(replaced(1), encode_array)

    def test_classes_without_fields_of_attrs(self) -> None:
        with pytest.raises(TypeError, match="is an attrs class; Bare is not"):
            encode_spec(Bare(), encode_array)

    def test_a_path_to_something_else(self) -> None:
        with pytest.raises(TypeError, match="builtins:dict is not a subclass of OperationSpec"):
            decode_spec(("builtins:dict",), decode_array)
        with pytest.raises(ModuleNotFoundError):
            decode_spec(("no_such_module:Spec",), decode_array)


class TestArrays:
    @settings(deadline=None)
    @given(
        data=st.data(),
        dtype=st.sampled_from(DType),
        shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    )
    def test_bit_for_bit_at_any_strides(
        self, data: st.DataObject, dtype: DType, shape: tuple[int, ...]
    ) -> None:
        content = data.draw(st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=10_000))
        if dtype is DType.bool:
            content = bytes(byte & 1 for byte in content)
        array = np.ndarray(shape, dtype.dtype, content)
        order = data.draw(st.permutations(range(len(shape))))
        steps = [data.draw(st.sampled_from((1, -1, 2))) for _ in shape]
        array = array.transpose(order)[tuple(slice(None, None, step) for step in steps)]
        got = decode_array(pickle.loads(pickle.dumps(encode_array(array), 5)))
        bit_for_bit(got, array)
        assert got.flags.writeable
        assert got.flags.c_contiguous
        assert not np.shares_memory(got, array)

    def test_each_decoding_is_an_array_of_its_own(self) -> None:
        data = encode_array(np.zeros(3))
        decode_array(data)[...] = 1
        assert not decode_array(data).any()

    @pytest.mark.parametrize("dtype", [">f4", "S3", object, "M8[s]", np.longdouble])
    def test_dtypes_that_devices_do_not_have(self, dtype: Any) -> None:
        with pytest.raises(TypeError, match="dtype"):
            encode_array(np.zeros(1, dtype))
