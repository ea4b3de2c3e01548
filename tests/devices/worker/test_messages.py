"""Declarations of messages: errors are raised at the declaration, by name."""

from __future__ import annotations

from typing import Any

import pytest

from trio_accel.devices.wire import _messages
from trio_accel.devices.wire._answers import ANSWERS


@pytest.fixture
def messages() -> _messages.Messages:
    return _messages.Messages(are_read=True)


def moved(number: int, place: str) -> None:
    """The message of the other end."""


class Taker:
    def on_moved(self, number: int, place: str) -> None: ...


class Forgetful:
    pass


class Wrong:
    def _on_moved(self, number: int) -> None: ...


class Stray(Taker):
    def on_removed(self) -> None: ...


class TestDeclarations:
    def test_a_message_is_its_name_and_its_fields(self) -> None:
        kind = _messages.Messages(are_read=False).declare()(moved)
        assert kind(3, "here") == ("moved", 3, "here")
        assert repr(kind) == "moved(number, place)"
        with pytest.raises(AssertionError, match="moved"):
            kind(3)  # type: ignore[call-arg]

    def test_the_readers_follow_from_the_annotations(self, messages: _messages.Messages) -> None:
        @messages.declare()
        def sent(
            number: _messages.Count,
            names: tuple[str, ...],
            sizes: dict[str, _messages.Integer],
            end: bool | None,
        ) -> None: ...

        good = (3, ("a", "b"), {"x": -1}, None)
        assert sent.read is not None
        assert sent.read(good) == good
        for place, bad in enumerate((-1, ("a", 1), {"x": 2**63}, 0)):
            with pytest.raises(ValueError, match="is no"):
                sent.read((*good[:place], bad, *good[place + 1 :]))
        with pytest.raises(ValueError, match="sequence of 4"):
            sent.read(good[:3])

    @pytest.mark.parametrize("hint", [int, list[str], int | str, str | int | None, tuple[int, str], Any])
    def test_a_field_that_nothing_reads(self, messages: _messages.Messages, hint: Any) -> None:
        def sent(place: str, number: object) -> None: ...

        sent.__annotations__["number"] = hint
        with pytest.raises(
            TypeError, match=r"sent\(place, number\): no reader fits the annotation of number"
        ):
            messages.declare()(sent)

    def test_a_field_without_an_annotation(self, messages: _messages.Messages) -> None:
        def sent(number: object) -> None: ...

        del sent.__annotations__["number"]
        with pytest.raises(TypeError, match="annotation of number"):
            messages.declare()(sent)

    def test_two_of_one_name(self) -> None:
        messages = _messages.Messages(are_read=False)
        messages.declare()(moved)
        with pytest.raises(TypeError, match=r"moved\(number, place\): another kind has the name"):
            messages.declare()(moved)

    def test_two_of_one_number(self, messages: _messages.Messages) -> None:
        def write(number: int) -> bytes:
            return bytes([1, number])

        def one(number: int) -> None: ...

        def other(number: int) -> None: ...

        kind = messages.declare(1, write=write, read=bytes)(one)
        assert messages.kinds["one"] is kind
        assert messages.writers["one"] is write
        with pytest.raises(TypeError, match=r"other\(number\): another kind has the tag 1"):
            messages.declare(1, write=write, read=list)(other)

    def test_a_layout_by_hand_for_other_fields(self, messages: _messages.Messages) -> None:
        def sent(number: int) -> None: ...

        def write(number: int, place: int) -> bytes:
            return bytes([number, place])

        with pytest.raises(TypeError, match=r"sent\(number\) does not fit its writer.*'place'"):
            messages.declare(1, write=write, read=bytes)(sent)


class TestHandlers:
    @pytest.fixture
    def moves(self) -> _messages.Messages:
        messages = _messages.Messages(are_read=False)
        messages.declare()(moved)
        return messages

    def test_they_are_found_by_their_names(self, moves: _messages.Messages) -> None:
        taker = Taker()
        assert _messages.handlers(moves, Forgetful, Taker)(Forgetful(), taker) == {"moved": taker.on_moved}

    @pytest.mark.parametrize(
        ("owners", "message"),
        [
            ([Forgetful], r"moved\(number, place\) is taken by no method"),
            ([Taker, Taker], r"Taker.on_moved: another method takes moved"),
            ([Wrong], r"Wrong._on_moved takes \['number'\], and the message is moved\(number, place\)"),
            ([Taker, Stray], r"Stray.on_removed takes \[\], and the message is None"),
        ],
    )
    def test_they_fit_the_declarations(
        self, moves: _messages.Messages, owners: list[type], message: str
    ) -> None:
        with pytest.raises(TypeError, match=message):
            _messages.handlers(moves, *owners)

    def test_descriptors_are_taken_with_their_message(self) -> None:
        messages = _messages.Messages(are_read=False)

        @messages.declare()
        def moved(number: int, place: str, *descriptors: int) -> None: ...

        assert moved.carries
        with pytest.raises(TypeError, match=r"Taker\.on_moved"):
            _messages.handlers(messages, Taker)

    def test_a_duplicate_kind(self, moves: _messages.Messages) -> None:
        kind = moves.kinds["moved"]
        assert _messages.handlers(moves, Forgetful, but=(kind,))(Forgetful()) == {}
        with pytest.raises(TypeError, match=r"moved.* is taken by a method"):
            _messages.handlers(moves, Taker, but=(kind,))


@pytest.mark.parametrize(
    "message",
    [
        ("ready", ("blas", "memory")),
        ("started",),
        ("prepared",),
        ("made", "a:B", 5, 2),
        ("progress", 3, "[1,2]"),
        ("times", 3, 5, 2**63),
        ("granted", 3, (1, 8, 1000, 2**64 - 1)),
        ("done", 3, ((1, 8, 1000, 0),), (b"\0\xff",), None),
        ("done", 3, (), (), ("done", True, False, None, (-1, 2))),
        ("chunk", 7, 4096),
        ("unchunk", 7),
        ("result", 1, (1, 1, {"a:B": 1}, (1,) * 7, {"a:B": (1, 2, 3, 4)}, (1,) * 7)),
        ("result", 1, None),
        ("log", "name", 10, "text\udc80"),
        ("closed",),
    ],
    ids=lambda message: message[0],
)
def test_answers_are_read_as_they_were_written(message: tuple[object, ...]) -> None:
    assert ANSWERS.decode(ANSWERS.encode(message)) == message
