"""How `trio-accel top` draws a fixed snapshot: what there is room for, and that it always fits."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Generator
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from top_snapshot import SHOP

from trio_accel.cli._top_draw import Status, draw_all, draw_screen
from trio_accel.cli._top_view import SORTS, View
from trio_accel.telemetry import ActorRow, MemoryRow, SystemSnapshot

STATUS = Status(name="shop-4711", pid=4711, interval=1.0)


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def screen(
    width: int,
    height: int,
    view: View | None = None,
    shown: SystemSnapshot | None = SHOP,
    status: Status = STATUS,
    **options: object,
) -> str:
    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        height=height,
        force_terminal=True,
        _environ={},
        **options,  # type: ignore[arg-type]
    )
    console.print(draw_screen(shown, view or View(), status, width=width, height=height))
    return file.getvalue()


def plain(*arguments: object, **options: object) -> list[str]:
    text = screen(*arguments, color_system=None, **options)  # type: ignore[arg-type]
    return [line.rstrip() for line in text.removesuffix("\n").split("\n")]


def test_80_columns() -> None:
    assert plain(80, 20) == [
        "shop-4711  process 4711  up 1 h 02 min  22:13:20  every 1 s",
        "7 actors  2 not running  1238 msg/s  5 queued  13 in flight  7 failed",
        "cpu:0  restarting  gen 3  2 losses  48.0 MiB of 64.0 MiB [━━━━━━  ]  4 waiting",
        "actor          state        msg/s queue flight      p50      p99 failed restarts",
        "shop           running",
        "├─ till        running       1234     5      1   350 µs  12.5 ms      7        7",
        "├─ cpu:0       running",
        "│  └─ context  restarting                                                      2",
        "│     ├─ blas  running        3.2           12    1.5 s   75.0 s",
        "│     └─ fft   quarantined",
        "└─ clerk       running        0.1                2.0 ms   2.0 ms",
        *[""] * 6,
        "22:13:10 shop/till restart (x7): ValueError: no price",
        "22:13:19 shop/cpu:0/context restart: ContextPoisonedError: lost",
        "q quit  ? keys  / filter  s sort  enter fold  e failures  o messages  p pause",
    ]


def test_40_columns() -> None:
    assert plain(40, 12) == [
        "shop-4711  process 4711  up 1 h 02 min",
        "7 actors  2 not running  1238 msg/s",
        "cpu:0  restarting  gen 3  2 losses",
        "actor 6/7      state        msg/s",
        "shop           running",
        "├─ till        running       1234",
        "├─ cpu:0       running",
        "│  └─ context  restarting",
        "│     ├─ blas  running        3.2",
        "│     └─ fft   quarantined",
        "22:13:19 shop/cpu:0/context restart: Co…",
        "q quit  ? keys  / filter  s sort",
    ]


def test_160_columns_have_everything() -> None:
    lines = plain(160, 14)
    assert lines[2] == (
        "cpu:0  restarting  gen 3  2 losses  48.0 MiB of 64.0 MiB [━━━━━━  ]  12 in flight  "
        "recovered in 26.7 ms  4 waiting  process 4712"
    )
    assert " ".join(lines[3].split()) == (
        "actor state msg/s queue flight p50 p99 failed restarts gen bytes handled process class"
    )
    assert lines[5].split()[1:] == [
        *("till", "running", "1234", "5", "1", "350", "µs", "12.5", "ms", "7", "7", "12.3k", "Till"),
        *("ValueError:", "no", "price"),
    ]
    assert lines[6].split()[1:] == ["cpu:0", "running", "3", "48.0", "MiB", "DeviceActor"]


@given(
    st.integers(1, 200),
    st.integers(1, 60),
    st.sampled_from([None, "failures", "operations", "help"]),
    st.sampled_from(list(SORTS)),
    st.sampled_from(["", "till", "nothing"]),
    st.booleans(),
    st.sampled_from([SHOP, attrs.evolve(SHOP, actors=()), None]),
)
def test_it_fits_any_terminal(
    width: int,
    height: int,
    page: object,
    sort: str,
    text: str,
    is_typing: bool,
    shown: SystemSnapshot | None,
) -> None:
    view = View(sort=sort, filter=text, page=page, is_typing=is_typing, is_paused=is_typing)  # type: ignore[arg-type]
    file = io.StringIO()
    # A console that is wider: a line that were too long would not be folded.
    console = Console(file=file, width=1000, color_system=None)
    console.print(draw_screen(shown, view, attrs.evolve(STATUS, silent=3.0), width=width, height=height))
    lines = file.getvalue().removesuffix("\n").split("\n")
    assert all(cell_len(line) <= width for line in lines)
    assert len(lines) == height


def test_colours_say_how_actors_are() -> None:
    colourful = screen(80, 20, color_system="standard")
    assert "\x1b[32mrunning" in colourful
    assert "\x1b[33mrestarting" in colourful
    assert "\x1b[31mquarantined" in colourful
    grey = screen(80, 20, color_system="standard", no_color=True)
    assert not any(f"\x1b[{number}m" in grey for number in range(30, 38))
    # What colours say is in words, too, and the selected line is reversed.
    assert "quarantined" in grey
    assert "\x1b[7m" in grey


def test_the_selected_line_is_the_one_in_reverse() -> None:
    view = View()
    view.lines(SHOP, 10)
    view.press("down")
    [line] = [line for line in screen(80, 20, view, color_system="standard").split("\n") if "[7m" in line]
    assert line.startswith("\x1b[7m├─ till ")
    assert line.endswith("7\x1b[0m")
    # So is the heading of the column by which the lines are ordered.
    drawn = screen(80, 20, View(sort="rate"), color_system="standard").split("\n")
    assert "7m msg/s" in drawn[3]


def test_the_filter_and_the_order_are_shown() -> None:
    assert plain(80, 20, View(filter="bl", is_typing=True))[-1] == "filter: bl_  enter keep  escape end"
    lines = plain(80, 20, View(filter="t", sort="rate"))
    assert lines[-1].startswith("filter: t  by rate  q quit")
    flat = ["shop/till", "shop/cpu:0/context/blas", "shop/clerk"]
    rates = [line.split()[0] for line in plain(120, 20, View(sort="rate"))[4:7]]
    assert rates == flat


def test_pages() -> None:
    failures = plain(80, 12, View(page="failures"))
    assert failures[2:8] == [
        "",
        "22:13:19 shop/cpu:0/context restart: ContextPoisonedError: lost",
        "  ContextPoisonedError: lost",
        "",
        "22:13:10 shop/till restart (x7): ValueError: no price",
        "  Traceback (most recent call last):",
    ]
    operations = plain(100, 12, View(page="operations"))
    assert " ".join(operations[2].split()) == "message msg/s done failed cancelled dropped p50 p99"
    assert " ".join(operations[3].split()) == "Sell till 1234 12.3k 7 1 2 350 µs 12.5 ms"
    libraries = [" ".join(line.split()) for line in plain(100, 12, View(page="libraries"))]
    assert libraries[2] == "library waiting flight plans found evicted workspace templates found"
    assert libraries[3] == "cpu:0 FftActor 4 12 1 99 % 3.0 MiB 1 75 %"
    assert libraries[4] == "cpu:0 Actor 1"
    assert any("fold what is below" in line for line in plain(80, 30, View(page="help")))
    nothing = attrs.evolve(SHOP, failures=(), devices=())
    assert plain(80, 12, View(page="libraries"), nothing)[3] == "no library of a device is in use"
    assert plain(80, 12, View(page="failures"), nothing)[2] == "nothing has failed since recording began"


def test_a_program_that_does_not_answer() -> None:
    lines = plain(80, 10, status=attrs.evolve(STATUS, silent=7.3))
    assert lines[0].startswith("shop-4711  no answer for 7 s: its loop is held  process 4711")
    assert "waiting for the program" in "\n".join(plain(80, 10, shown=None))
    assert plain(80, 10, View(is_paused=True))[0].startswith("shop-4711  paused")


def test_signs_of_control_are_not_obeyed() -> None:
    evil = ActorRow(path="s/\x1b[2J\n", actor_class="\x07", state="\x1b]0;x\x07", last_error="\x1b[31m")
    shown = attrs.evolve(SHOP, actors=(evil,), devices=())
    text = screen(160, 10, shown=shown, status=Status(name="\x1b[1m", pid=1), color_system=None)
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert "?[2J?" in text


EVIL = "\x1b]0;x\x07\x9b2J\u202eabc\r\n\t\0\u2028"


def spoiled(part: Any, evil: str) -> Any:
    """The same with something behind every text in it."""
    if isinstance(part, dict):
        return {name: spoiled(value, evil) for name, value in part.items()}
    if isinstance(part, list):
        return [spoiled(each, evil) for each in part]
    return part + evil if isinstance(part, str) else part


@pytest.mark.parametrize("page", [None, "failures", "operations", "libraries", "help"])
@pytest.mark.parametrize("evil", [EVIL, "\u0301" * 50_000, "x" * 50_000], ids=["control", "marks", "long"])
def test_no_text_of_a_program_leaves_its_line(monkeypatch: pytest.MonkeyPatch, page: Any, evil: str) -> None:
    """All are spoiled at once. One that is long beyond any terminal is not looked at to its end."""
    seen: list[int] = []

    def looked(text: str) -> str:
        seen.append(len(text))
        return "".join(char if char.isprintable() else "?" for char in text)

    monkeypatch.setattr("trio_accel.cli._top_draw.printable", looked)
    shown = SystemSnapshot.from_json(json.dumps(spoiled(json.loads(SHOP.to_json()), evil)))
    for width, height in ((80, 24), (200, 60)):
        lines = plain(width, height, View(page=page), shown)
        assert len(lines) == height
        assert all(line.isprintable() and cell_len(line) <= width for line in lines)
    for line in draw_all(shown, View(), Status(name="x", pid=1), width=180):
        assert line.plain.isprintable()
        assert cell_len(line.plain) <= 180
    assert 0 < max(seen) <= 10_000


def test_everything_has_all_lines() -> None:
    rows = tuple(ActorRow(path=f"s/a{number}", actor_class="A", state="running") for number in range(500))
    lines = draw_all(attrs.evolve(SHOP, actors=rows), View(), Status(name="x", pid=None), width=100)
    assert sum(line.plain.startswith("a") for line in lines) == 501


def cell(heading: str, width: int, used: int = 0, **figures: Any) -> str:
    """What a column shows of a device's actor, in so many columns of the terminal."""
    row = ActorRow(path="s/x", actor_class="A", state="running", **figures)
    memory = MemoryRow(used=used, reserved=0, peak=0, blocks=0, limit=1)
    device = attrs.evolve(SHOP.devices[0], path="s/x", memory=memory)
    shown = attrs.evolve(SHOP, actors=(row,), devices=(device,), failures=())
    *_, head, line = [text.plain for text in draw_all(shown, View(), STATUS, width=180)]
    end = head.index(heading) + len(heading)
    return line[end - width : end].strip()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, ""), (0.04, "0.0"), (0.1, "0.1"), (1, "1"), (9.96, "10.0"), (99.94, "99.9"), (99.96, "100")),
        *(
            (1234.4, "1234"),
            (9994, "9994"),
            (12345, "12.3k"),
            (999_400, "999k"),
            (1_000_000, "1M"),
            (3e9, "3G"),
        ),
    ],
)
def test_counts(number: float, text: str) -> None:
    assert cell("msg/s", 6, rate=number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, ""), (0.0, "0.0 µs"), (1e-6, "1.0 µs"), (0.000350, "350 µs"), (0.0009996, "1.0 ms")),
        *(
            (0.0125, "12.5 ms"),
            (0.9996, "1.0 s"),
            (75, "75.0 s"),
            (998, "998 s"),
            (1200, "20 min"),
            (7200, "2.0 h"),
        ),
    ],
)
def test_times(seconds: float | None, text: str) -> None:
    assert cell("p50", 8, p50=seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (48 << 30, "48.0 GiB"),
        (1 << 42, "4.0 TiB"),
    ],
)
def test_bytes(number: int, text: str) -> None:
    assert cell("bytes", 9, number) == text


@given(st.floats(0, 1e15))
def test_numbers_fit_their_columns(number: float) -> None:
    for shown in (
        cell("msg/s", 6, rate=min(number, 9e11)),
        cell("p50", 8, p50=min(number, 3e7)),
        cell("bytes", 9, int(number)),
    ):
        assert "…" not in shown


def test_failures_of_actors_that_have_ended_are_counted() -> None:
    ended = attrs.evolve(SHOP.operations[0], path="shop/cpu:0/context/ended", failed=4)
    totals = plain(100, 20, shown=attrs.evolve(SHOP, operations=(*SHOP.operations, ended)))[1]
    assert "11 failed" in totals
