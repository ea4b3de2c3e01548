"""Errors that cross from a worker process as plain values."""

from __future__ import annotations

import builtins
import enum
import gc
import pickle
import pickletools
import weakref
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_accel import actors
from trio_accel.actors import ActorError, ActorFailedError, ActorStoppedError
from trio_accel.backends.base import (
    AccelError,
    ContextLostError,
    InputFailedError,
    LibraryError,
    OutOfMemoryError,
)
from trio_accel.backends.base.contract import errors
from trio_accel.devices.wire._wire_values import decode_error, encode_error

pytestmark = pytest.mark.no_device

ACCEL = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, AccelError)
]
ACTOR = [
    value for value in vars(actors).values() if isinstance(value, type) and issubclass(value, ActorError)
]
BUILTIN = sorted(
    {
        value
        for value in vars(builtins).values()
        if isinstance(value, type) and issubclass(value, Exception) and not issubclass(value, ExceptionGroup)
    },
    key=lambda cls: cls.__name__,
)
UNICODE = [
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    UnicodeEncodeError("ascii", "é", 0, 1, "bad"),
    UnicodeTranslateError("é", 0, 1, "bad"),
]
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


def across(error: BaseException) -> Exception:
    """Send an error through the pickler, which may import and call nothing."""
    data = pickle.dumps(encode_error(error), 5)
    names = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert names.isdisjoint({"GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD"})
    return decode_error(pickle.loads(data))


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """The same error with a traceback."""
    with pytest.raises(type(error)) as caught:
        raise error from cause
    return caught.value


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def arguments(cls: type[AccelError]) -> dict[str, Any]:
    texts = {
        "message": "why",
        "device": "cpu:0",
        "operation": "linalg.Matmul",
        "library": "blas",
        "backend": "cpu",
        "log": "saxpy.cu(3): error",
        "source": "saxpy.cu",
    }
    numbers = {"generation": 3, "requested": 2**40, "free": 0, "total": 7, "code": "SINGULAR"}
    known = {
        **texts,
        **numbers,
        "is_memory_damaged": True,
        "is_unchanged": True,
        "retry_after": 1.5,
        "is_to_blame": True,
        "index": (3, 1),
        "options": ("-DN=4",),
        "axis": 1,
        "length": 4,
    }
    return {field.alias: known[field.name] for field in attrs.fields(cls)}


class StrangeError(Exception):
    pass


class StrangeValueError(ValueError):
    pass


class StrangeFileError(FileNotFoundError):
    pass


class StrangeDecodeError(UnicodeDecodeError):
    pass


class StrangeTranslateError(UnicodeTranslateError):
    pass


class StrangeActorError(ActorStoppedError):
    pass


@attrs.define(eq=False, slots=False)
class StrangeMemoryError(OutOfMemoryError):
    extra: object = attrs.field(kw_only=True)


class Status(enum.IntEnum):
    SINGULAR = 5


class BrokenError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    def __repr__(self) -> str:
        raise ValueError("no text")


class BrokenValueError(ValueError):
    __str__ = __repr__ = BrokenError.__str__


class HostileError(Exception):
    @property
    def args(self) -> Any:
        raise RuntimeError

    @property
    def __cause__(self) -> Any:
        raise RuntimeError

    @property
    def __traceback__(self) -> Any:
        raise RuntimeError

    @property
    def __notes__(self) -> Any:
        raise RuntimeError


class TestRegistered:
    @pytest.mark.parametrize("cls", ACCEL)
    @pytest.mark.parametrize("is_full", [True, False])
    def test_errors_of_devices_field_by_field(self, cls: type[AccelError], is_full: bool) -> None:
        fields = arguments(cls)
        if not is_full:
            required = {field.alias for field in attrs.fields(cls) if field.default is attrs.NOTHING}
            fields = {name: value for name, value in fields.items() if name in required}
        error = cls(**fields)
        got = across(error)
        assert type(got) is cls
        assert str(got) == str(error)
        assert attrs.asdict(got) == attrs.asdict(error)

    def test_fields_filled_in_later_by_the_engine(self) -> None:
        error = LibraryError("singular", library="solver", code=7)
        error.device, error.generation = "cuda:0", 2
        got = across(error)
        assert attrs.asdict(got) == attrs.asdict(error)  # type: ignore[arg-type]

    @pytest.mark.parametrize("cls", ACTOR)
    def test_errors_of_actors(self, cls: type[ActorError]) -> None:
        got = across(cls("it stopped", path="/cpu:0/blas"))
        assert type(got) is cls
        assert isinstance(got, ActorError)
        assert (str(got), got.path) == ("it stopped", "/cpu:0/blas")

    @pytest.mark.parametrize("cls", [cls for cls in BUILTIN if cls not in map(type, UNICODE)])
    def test_errors_of_python(self, cls: type[Exception]) -> None:
        for args in ((), ("text",), (2, "text")):
            error = cls(*args)
            got = across(error)
            assert type(got) is type(error)
            assert got.args == error.args
            assert str(got) == str(error)

    @pytest.mark.parametrize("error", UNICODE, ids=lambda error: type(error).__name__)
    def test_errors_of_encodings(self, error: UnicodeError) -> None:
        got = across(error)
        assert type(got) is type(error)
        assert got.args == error.args
        assert str(got) == str(error)

    @pytest.mark.parametrize(
        "error",
        [
            OSError(28, "No space left on device", "/tmp/a"),
            OSError(2, "No such file", "/tmp/a", None, "/tmp/b"),
            FileExistsError(17, "File exists", b"/tmp/a"),
            PermissionError("only a text"),
            OSError(5, None),
        ],
        ids=repr,
    )
    def test_errors_of_the_system(self, error: OSError) -> None:
        got = across(error)
        assert type(got) is type(error)
        assert isinstance(got, OSError)
        assert str(got) == str(error)
        for name in ("errno", "strerror", "filename", "filename2", "args"):
            assert getattr(got, name) == getattr(error, name)

    def test_paths_become_strings(self) -> None:
        got = across(OSError(2, "No such file", Path("/tmp/a")))
        assert isinstance(got, FileNotFoundError)
        assert got.filename == "/tmp/a"

    def test_names_that_python_adds(self) -> None:
        missing = across(ModuleNotFoundError("no", name="cupy", path="/x"))
        assert isinstance(missing, ModuleNotFoundError)
        assert (missing.name, missing.path) == ("cupy", "/x")
        attribute = across(AttributeError("no", name="shape", obj=object()))
        assert isinstance(attribute, AttributeError)
        assert (attribute.name, attribute.obj) == ("shape", None)

    @pytest.mark.parametrize("cls", [trio.BrokenResourceError, trio.TooSlowError, trio.WouldBlock])
    def test_errors_of_trio(self, cls: type[Exception]) -> None:
        got = across(cls("text"))
        assert type(got) is cls
        assert got.args == ("text",)

    @settings(deadline=None)
    @given(
        cls=st.sampled_from([Exception, ValueError, KeyError, RuntimeError]), args=st.lists(PLAIN, max_size=4)
    )
    def test_any_plain_arguments(self, cls: type[Exception], args: list[Any]) -> None:
        got = across(cls(*args))
        assert type(got) is cls
        assert got.args == tuple(args)
        assert repr(got) == repr(cls(*args))

    def test_other_arguments_are_sent_as_text(self) -> None:
        error = ValueError("shape", np.zeros(2))
        assert across(error).args == (str(error),)

    @pytest.mark.parametrize(
        ("code", "plain"),
        [(Status.SINGULAR, 5), (np.int32(7), 7), (np.str_("x"), "x"), ((1, "a"), (1, "a")), ([1], "[1]")],
        ids=repr,
    )
    def test_fields_become_plain(self, code: Any, plain: object) -> None:
        got = across(LibraryError("no", library="blas", code=code))
        assert isinstance(got, LibraryError)
        assert got.code == plain
        assert type(got.code) is type(plain)

    def test_a_field_without_a_text(self) -> None:
        got = across(LibraryError("no", library="blas", code=BrokenError()))  # type: ignore[arg-type]
        assert isinstance(got, LibraryError)
        assert got.code == "(BrokenError: __repr__ fails)"


class TestStrangers:
    def test_sent_as_the_nearest_known_class(self) -> None:
        name = f"{__name__}."
        value = across(StrangeValueError("bad", 3))
        assert type(value) is ValueError
        assert str(value) == f"{name}StrangeValueError: ('bad', 3)"
        file = across(StrangeFileError(2, "gone", "/tmp/a"))
        assert type(file) is FileNotFoundError
        assert (file.errno, file.filename, file.strerror) == (2, "/tmp/a", f"{name}StrangeFileError: gone")
        decode = across(StrangeDecodeError("utf-8", b"\xff", 0, 1, "bad"))
        assert type(decode) is UnicodeDecodeError
        assert (decode.object, decode.reason) == (b"\xff", f"{name}StrangeDecodeError: bad")
        actor = across(StrangeActorError("ended", path="/a"))
        assert type(actor) is ActorStoppedError
        assert (actor.path, str(actor)) == ("/a", f"{name}StrangeActorError: ended")

    def test_of_devices_keep_the_fields_of_the_known_class(self) -> None:
        error = StrangeMemoryError("full", device="cpu:0", requested=3, free=2, total=1, extra=object())
        got = across(error)
        assert type(got) is OutOfMemoryError
        assert (got.requested, got.free, got.total, got.device) == (3, 2, 1, "cpu:0")
        assert got.message == f"{__name__}.StrangeMemoryError: full"

    def test_of_no_known_class_are_runtime_errors(self) -> None:
        got = across(StrangeError("what"))
        assert type(got) is RuntimeError
        assert str(got) == f"{__name__}.StrangeError: what"

    def test_with_a_constructor_of_its_own_kind(self) -> None:
        got = across(StrangeTranslateError("é", 0, 1, "bad"))
        assert type(got) is RuntimeError
        assert f"{__name__}.StrangeTranslateError: can't translate" in str(got)

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
    def test_of_other_types(self, error: BaseException) -> None:
        got = across(error)
        assert type(got) is RuntimeError
        assert str(got) == f"{type(error).__name__}: {error}"

    async def test_cancellation(self) -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            try:
                await trio.lowlevel.checkpoint()
            except trio.Cancelled as error:
                got = across(error)
                raise
        assert type(got) is RuntimeError
        assert str(got).startswith("trio.Cancelled: ")

    @pytest.mark.parametrize(("cls", "known"), [(BrokenError, RuntimeError), (BrokenValueError, ValueError)])
    def test_without_a_text(self, cls: type[Exception], known: type[Exception]) -> None:
        got = across(raised(cls("x")))
        assert type(got) is known
        assert str(got) == f"{__name__}.{cls.__name__}: (its text cannot be had: __str__ fails)"

    def test_among_the_arguments_of_others(self) -> None:
        assert type(across(ValueError("x", BrokenError()))) is ValueError

    def test_that_fight_back(self) -> None:
        got = across(HostileError("x"))
        assert type(got) is RuntimeError
        assert "HostileError" in str(got)

    def test_a_name_that_this_end_does_not_know(self) -> None:
        _, *rest = encode_error(ValueError("x"))
        got = decode_error(("some.NewerError", *rest))
        assert type(got) is RuntimeError
        assert str(got) == "ValueError: x"


class TestCauses:
    def test_a_chain(self) -> None:
        root = raised(OutOfMemoryError("full", requested=3, free=2, total=1))
        middle = raised(StrangeError("middle"), root)
        got = across(raised(InputFailedError("input"), middle))
        assert type(got) is InputFailedError
        assert type(got.__cause__) is RuntimeError
        assert got.__suppress_context__
        last = got.__cause__.__cause__
        assert isinstance(last, OutOfMemoryError)
        assert last.requested == 3
        assert last.__cause__ is None

    def test_context_is_not_sent(self) -> None:
        error = ValueError("second")
        try:
            int("first")
        except ValueError:
            raised(error)
        assert error.__context__ is not None
        got = across(error)
        assert got.__cause__ is None
        assert got.__context__ is None

    def test_a_circle_ends(self) -> None:
        first, second = ActorFailedError("a", path="/a"), ValueError("b")
        first.__cause__, second.__cause__ = second, first
        got: BaseException | None = across(first)
        length = 0
        while got is not None:
            got, length = got.__cause__, length + 1
        assert 2 <= length <= 10

    def test_a_long_chain_is_cut(self) -> None:
        error: Exception = ValueError(0)
        for number in range(1, 5000):
            following = ValueError(number)
            following.__cause__ = error
            error = following
        got = across(error)
        assert got.args == (4999,)
        assert isinstance(got.__cause__, ValueError)


class TestNotes:
    def test_its_origin_is_a_note_after_its_other_notes(self) -> None:
        error = raised(ContextLostError("lost"), raised(ValueError("cause")))
        error.add_note("first")
        error.add_note("second")
        got = across(error)
        assert notes(got)[:2] == ["first", "second"]
        (where,) = notes(got)[2:]
        assert where.startswith("in the worker process:\n")
        assert "in raised" in where
        assert "raise error from cause" in where
        assert got.__traceback__ is None
        assert got.__cause__ is not None
        assert "in raised" in notes(got.__cause__)[0]

    def test_an_unraised_error_has_none(self) -> None:
        assert notes(across(ValueError("x"))) == []

    def test_notes_of_other_types_are_left_out(self) -> None:
        error = ValueError("x")
        error.__notes__ = ["fine", 3, np.str_("sub")]  # type: ignore[list-item]
        assert notes(across(error)) == ["fine", "sub"]
        error.__notes__ = 7  # type: ignore[assignment]
        assert notes(across(error)) == []

    def test_the_end_of_a_deep_recursion_is_reported(self) -> None:
        def even(depth: int) -> None:
            if depth == 0:
                raise ValueError("bottom")
            odd(depth - 1)

        def odd(depth: int) -> None:
            even(depth - 1)

        with pytest.raises(ValueError, match="bottom") as caught:
            even(400)
        (where,) = notes(across(caught.value))
        assert where.count("in odd") < 50
        assert where.endswith('raise ValueError("bottom")')

    def test_no_frame_is_kept(self) -> None:
        class Held:
            pass

        def fail() -> tuple[object, weakref.ref[Held]]:
            held = Held()
            try:
                int("x")
            except ValueError as error:
                return decode_error(encode_error(error)), weakref.ref(held)

        got, held = fail()
        gc.collect()
        assert held() is None
        assert isinstance(got, ValueError)


class TestGroups:
    def test_members_are_sent_one_by_one(self) -> None:
        group = ExceptionGroup(
            "several",
            [raised(ValueError("a")), ExceptionGroup("inner", [LibraryError("b", library="fft", code=1)])],  # type: ignore[list-item]
        )
        group.add_note("of the group")
        got = across(raised(group))
        assert type(got) is ExceptionGroup
        assert str(got) == str(group)
        assert notes(got)[0] == "of the group"
        first, second = got.exceptions
        assert type(first) is ValueError
        assert "in raised" in notes(first)[0]
        assert isinstance(second, ExceptionGroup)
        assert isinstance(second.exceptions[0], LibraryError)

    def test_of_other_types(self) -> None:
        got = across(BaseExceptionGroup("both", [KeyboardInterrupt(), ValueError("x")]))
        assert type(got) is ExceptionGroup
        assert [type(member) for member in got.exceptions] == [RuntimeError, ValueError]

    def test_of_a_class_of_its_own(self) -> None:
        class Special(ExceptionGroup[ValueError]):  # noqa: ASYNC126  # as a stranger would
            pass

        got = across(Special("several", [ValueError("x")]))
        assert isinstance(got, ExceptionGroup)
        assert got.message.endswith("Special: several")

    def test_large_and_deep_groups_are_cut(self) -> None:
        group = ExceptionGroup("wide", [ValueError(number) for number in range(5000)])
        got = across(group)
        assert isinstance(got, ExceptionGroup)
        assert 10 < len(got.exceptions) < 100
        deep: Exception = ValueError("bottom")
        for _ in range(100):
            deep = ExceptionGroup("deep", [deep])
        assert isinstance(across(deep), ExceptionGroup)
        bush: Exception = ValueError("leaf")
        for _ in range(40):
            bush = ExceptionGroup("bush", [bush, bush])
        assert len(pickle.dumps(encode_error(bush))) < 20_000
