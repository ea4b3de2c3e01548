"""How `trio-accel top` draws a fixed snapshot: what there is room for, and that it always fits."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from top_snapshot import SHOP

from trio_accel.cli import _top
from trio_accel.cli._top import draw_screen
from trio_accel.telemetry import ActorRow, FailureRow, ObservedProgram, SystemSnapshot

PROGRAM = ObservedProgram(name="shop-4711", pid=4711, path=Path("/run/shop-4711.sock"))


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def screen(width: int, height: int, shown: SystemSnapshot = SHOP, silent: float = 0.0, **options: Any) -> str:
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, _environ={}, **options
    )
    console.print(draw_screen(console, PROGRAM, shown, silent))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def plain(width: int, height: int, shown: SystemSnapshot = SHOP, silent: float = 0.0) -> list[str]:
    text = screen(width, height, shown, silent, color_system=None).removesuffix("\n").removesuffix("\n")
    return [line.rstrip() for line in text.split("\n")]


def test_80_columns() -> None:
    assert plain(80, 24) == [
        "shop-4711, process 4711, up 1:02:05, 22:13:20",
        "7 actors, 2 not running, 1.24k messages/s, 5 queued, 13 in flight, 7 failed, 9",
        "restarts, 2 dead letters",
        "cpu:0  restarting, generation 3, 2 contexts lost, 48 MiB of 64 MiB, 12 in",
        "       flight, 4 waiting, recovered in 26.7 ms, process 4712",
        "cpu:0  FftActor, 4 waiting, 12 in flight, 1 plan, 99 % found again, 3 MiB of",
        "       workspace",
        "cpu:0  Actor, 0 waiting, 1 in flight",
        "actor         state        msg/s queue      p99 failed restarts flight      p50",
        "shop          running",
        "├─ till       running      1.23k     5  12.5 ms      7        7      1   350 µs",
        "├─ cpu:0      running",
        "│  └─ context restarting                                      2",
        "│     ├─ blas running       3.25           75 s                     12    1.5 s",
        "│     └─ fft  quarantined",
        "└─ clerk      running        0.1           2 ms                            2 ms",
        "22:13:19  shop/cpu:0/context was restarted: ContextPoisonedError: lost",
        "22:13:10  shop/till was restarted over Sell, 7 times: ValueError: no price",
        *[""] * 5,
        "q leaves; trio-accel top --json has tracebacks",
    ]


def test_50_columns_and_15_lines() -> None:
    assert plain(50, 15, silent=7.3) == [
        "shop-4711, no answer for 7 s: its loop is held,",
        "process 4711, up 1:02:05, 22:13:20",
        "7 actors, 2 not running, 1.24k messages/s, 5",
        "queued, 13 in flight, 7 failed, 9 restarts, 2 dead",
        "letters",
        "actor         state        msg/s queue      p99",
        "shop          running",
        "├─ till       running      1.23k     5  12.5 ms",
        "├─ cpu:0      running",
        "│  └─ context restarting",
        "│     ├─ blas running       3.25           75 s",
        "and 2 more, which trio-accel top --once prints",
        "22:13:19  shop/cpu:0/context was restarted:",
        "          ContextPoisonedError: lost",
        "q leaves; trio-accel top --json has tracebacks",
    ]


def test_160_columns_have_everything() -> None:
    lines = plain(160, 20)
    assert lines[2] == (
        "cpu:0  restarting, generation 3, 2 contexts lost, 48 MiB of 64 MiB, 12 in flight, 4 waiting, "
        "recovered in 26.7 ms, process 4712"
    )
    assert " ".join(lines[5].split()) == (
        "actor state msg/s queue p99 failed restarts flight p50 handled arrays process class"
    )
    assert lines[7].split()[1:] == [
        *("till", "running", "1.23k", "5", "12.5", "ms", "7", "7", "1", "350", "µs", "12.3k", "Till")
    ]
    assert lines[12].split()[-3:] == ["4", "KiB", "Clerk"]


@given(
    st.integers(1, 200),
    st.integers(1, 60),
    st.sampled_from([SHOP, attrs.evolve(SHOP, actors=()), attrs.evolve(SHOP, devices=(), failures=())]),
    st.sampled_from([0.0, 3.0]),
)
def test_it_fits_any_terminal(width: int, height: int, shown: SystemSnapshot, silent: float) -> None:
    lines = plain(width, height, shown, silent)
    assert all(cell_len(line) <= width for line in lines)
    assert len(lines) == height


def test_colours_say_how_actors_are() -> None:
    colourful = screen(80, 24, color_system="standard")
    assert "\x1b[32mrunning" in colourful
    assert "\x1b[33mrestarting" in colourful
    assert "\x1b[31mquarantined" in colourful
    grey = screen(80, 24, color_system="standard", no_color=True)
    assert not any(f"\x1b[{number}m" in grey for number in range(30, 38))
    # What colours say is in words, too.
    assert "quarantined" in grey


def test_a_program_that_does_not_answer() -> None:
    assert plain(80, 10, silent=7.3)[0].startswith("shop-4711, no answer for 7 s: its loop is held, process")


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("message", "failed over Sell, 3 times since 22:12:00: ValueError: no"),
        ("restart", "was restarted over Sell, 3 times since 22:12:00: ValueError: no"),
        ("end", "ended for good over Sell, 3 times since 22:12:00: ValueError: no"),
        ("supervisor", "gave up, as what is below it failed too often over Sell, 3 times since 22:12:00: "),
        ("of a newer version", "of a newer version over Sell, 3 times since 22:12:00: ValueError: no"),
    ],
)
def test_failures_are_told_in_words(kind: str, what: str) -> None:
    failure = FailureRow(
        time=SHOP.time,
        first=SHOP.time - 80,
        path="shop/till",
        kind=kind,
        message_type="Sell",
        error="ValueError: no\nprice",
        traceback="",
        count=3,
    )
    lines = plain(160, 24, attrs.evolve(SHOP, failures=(failure,)))
    assert any(line.startswith(f"22:13:20  shop/till {what}") for line in lines)


def test_an_error_is_wrapped_and_not_cut() -> None:
    error = "ValueError: " + " ".join(f"word{number}" for number in range(30)) + "; do this instead"
    failure = attrs.evolve(SHOP.failures[0], error=error)
    text = " ".join(" ".join(plain(60, 30, attrs.evolve(SHOP, failures=(failure,)))).split())
    assert error in text


def test_the_parts_of_a_long_restart_are_told() -> None:
    text = "restart 1.50 s: worker and context 0.30 s, import of shop 1.20 s; shop is imported, because x"
    for cost, told in ((1.5, text), (0.9, "restart 1.50 s")):
        device = attrs.evolve(SHOP.devices[0], recovery_cost=cost, recovery_text=text)
        line = plain(400, 24, attrs.evolve(SHOP, devices=(device,)))[2]
        assert line.endswith(f", process 4712, {told}")


EVIL = "\x1b]0;x\x07\x9b2J\u202eabc\r\n\t\0\u2028"


def spoiled(part: Any, evil: str) -> Any:
    """The same with something behind every text in it."""
    if isinstance(part, dict):
        return {name: spoiled(value, evil) for name, value in part.items()}
    if isinstance(part, list):
        return [spoiled(each, evil) for each in part]
    return part + evil if isinstance(part, str) else part


@pytest.mark.parametrize(
    "evil",
    [EVIL, "\u0301" * 50_000, "x" * 50_000, "[red]x[/] [/]", "漢" * 500],
    ids=["control", "marks", "long", "markup", "wide"],
)
def test_no_text_of_a_program_leaves_its_line(monkeypatch: pytest.MonkeyPatch, evil: str) -> None:
    """All are spoiled at once. One that is long beyond any terminal is not looked at to its end."""
    seen: list[int] = []

    def looked(text: str) -> str:
        seen.append(len(text))
        return "".join(char if char.isprintable() else "?" for char in text)

    monkeypatch.setattr(_top, "printable", looked)
    shown = SystemSnapshot.from_json(json.dumps(spoiled(json.loads(SHOP.to_json()), evil)))
    for width, height in ((50, 15), (80, 24), (200, 60)):
        lines = plain(width, height, shown)
        assert len(lines) == height
        assert all(line.isprintable() and cell_len(line) <= width for line in lines)
    assert 0 < max(seen) <= 10_000


def actor_lines(rows: list[ActorRow], width: int = 400, height: int = 100) -> list[str]:
    shown = attrs.evolve(SHOP, actors=tuple(rows), devices=(), failures=())
    lines = plain(width, height, shown)
    return lines[next(place for place, line in enumerate(lines) if line.startswith("actor")) :]


NAMES = st.sampled_from(["a", "b", "c", "till", "blas"])


@given(st.lists(st.lists(NAMES, min_size=1, max_size=5), max_size=12))
def test_the_tree_is_whole_and_in_order(places: list[list[str]]) -> None:
    found = {("s", *parts[:end]) for parts in places for end in range(len(parts) + 1)} | {("s",)}
    rows = [ActorRow(path="/".join(parts), actor_class="A", state="running") for parts in sorted(found)]
    lines = actor_lines(rows)[1 : len(rows) + 1]
    for line, row in zip(lines, rows, strict=True):
        before = line[: 3 * row.depth]
        assert line[3 * row.depth :].split()[:2] == [row.name, "running"]
        if row.depth:
            last = [other.path for other in rows if other.parent == row.parent][-1]
            assert before.endswith("└─ " if last == row.path else "├─ ")


def test_a_tree_deeper_than_the_stack() -> None:
    rows = [
        ActorRow(path="/".join(["s"] * depth), actor_class="A", state="running") for depth in range(1, 3000)
    ]
    lines = actor_lines(rows, 80, 24)
    assert lines[1].split()[:2] == ["s", "running"]
    [left_out] = [line for line in lines if line.startswith("and ")]
    drawn = lines.index(left_out) - 1
    assert left_out == f"and {2999 - drawn} more, which trio-accel top --once prints"


def test_an_actor_whose_parent_is_missing_is_shown() -> None:
    rows = [ActorRow(path="s/gone/x", actor_class="A", state="running")]
    assert actor_lines(rows)[1].split()[:2] == ["x", "running"]


def cell(heading: str, width: int, **figures: Any) -> str:
    """What a column shows of an actor, in so many columns of the terminal."""
    row = ActorRow(path="s/x", actor_class="A", state="running", **figures)
    head, line = actor_lines([row])[:2]
    end = re.search(rf"{heading}\b", head).end()  # type: ignore[union-attr]
    return line[end - width : end].strip()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, ""), (0.004, "0"), (0.04, "0.04"), (0.1, "0.1"), (1, "1"), (9.96, "9.96"), (99.96, "100")),
        *((999.4, "999"), (999.5, "1k"), (1234.4, "1.23k"), (12345, "12.3k"), (999_400, "999k")),
        *((1_000_000, "1M"), (3e9, "3G"), (3e12, "3000G")),
    ],
)
def test_counts(number: float, text: str) -> None:
    assert cell("msg/s", 6, rate=number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, ""), (0.0, "0 µs"), (1e-6, "1 µs"), (0.000350, "350 µs"), (0.0009996, "1 ms")),
        *((0.0125, "12.5 ms"), (0.9996, "1 s"), (75, "75 s"), (998, "998 s"), (7200, "2 h")),
    ],
)
def test_times(seconds: float | None, text: str) -> None:
    assert cell("p50", 8, p50=seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *(
            (0, ""),
            (999, "999 B"),
            (1023, "1 KiB"),
            (1024, "1 KiB"),
            (1 << 20, "1 MiB"),
            (48 << 30, "48 GiB"),
        ),
        *((48 << 30, "48 GiB"), (1 << 42, "4 TiB")),
    ],
)
def test_bytes(number: int, text: str) -> None:
    assert cell("arrays", 9, array_bytes=number) == text


@given(st.floats(0, 1e15))
def test_numbers_fit_their_columns(number: float) -> None:
    for shown in (
        cell("msg/s", 6, rate=min(number, 9e11)),
        cell("p50", 8, p50=min(number, 3e7)),
        cell("arrays", 9, array_bytes=int(number)),
    ):
        assert "…" not in shown


def test_failures_of_actors_that_have_ended_are_counted() -> None:
    ended = attrs.evolve(SHOP.operations[0], path="shop/cpu:0/context/ended", failed=4)
    assert "11 failed" in plain(100, 20, attrs.evolve(SHOP, operations=(*SHOP.operations, ended)))[1]


@pytest.mark.parametrize("uptime", [0.0, 1e19])
def test_times_beyond_all_calendars(uptime: float) -> None:
    assert plain(100, 20, attrs.evolve(SHOP, uptime=uptime, time=1e19))[0].startswith(
        "shop-4711, process 4711, up "
    )
