"""Which lines `trio-accel top` shows, against a plain model of trees, filters and orders."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from top_snapshot import SHOP

from trio_accel.cli._top_view import SORTS, View
from trio_accel.telemetry import ActorRow, SystemSnapshot

NAMES = st.sampled_from(["a", "b", "c", "till", "blas"])


@st.composite
def trees(draw: st.DrawFn) -> list[ActorRow]:
    """Actors in the order of the tree, with paths of their own."""
    paths = {("s",)}
    for parts in draw(st.lists(st.lists(NAMES, min_size=1, max_size=5), max_size=12)):
        for end in range(len(parts) + 1):
            paths.add(("s", *parts[:end]))
    numbers = st.integers(0, 3)
    return [
        ActorRow(
            path="/".join(parts),
            actor_class=draw(st.sampled_from(["Till", "BlasActor"])),
            state=draw(st.sampled_from(["running", "restarting"])),
            rate=float(draw(numbers)),
            failed=draw(numbers),
            mailbox_depth=draw(numbers),
            p99=draw(st.none() | st.floats(0, 1)),
        )
        for parts in sorted(paths)
    ]


def snapshot(rows: list[ActorRow]) -> SystemSnapshot:
    return SystemSnapshot(time=0.0, system="s", pid=1, uptime=0.0, recorded=0.0, actors=tuple(rows))


def lines_of(rows: list[ActorRow], view: View) -> Any:
    """All lines: there is room for each."""
    return view.lines(snapshot(rows), len(rows))


def paths(lines: object) -> list[str]:
    return [line.row.path for line in lines]  # type: ignore[attr-defined]


@given(trees())
def test_the_tree_is_whole_and_in_order(rows: list[ActorRow]) -> None:
    lines = lines_of(rows, View())
    assert [line.row for line in lines] == rows
    # As `ActorSnapshot` draws it: what stands before a name is as long as the actor is deep.
    assert [len(line.before) for line in lines] == [3 * row.depth for row in rows]
    for line in lines[1:]:
        siblings = [row.path for row in rows if row.parent == line.row.parent]
        assert line.before.endswith("└─ " if siblings[-1] == line.row.path else "├─ ")


@given(trees(), st.sampled_from(["a", "till", "TILL", "s/b", "restart", "BlasActor", "nothing", ""]))
def test_a_filter_shows_what_matches_and_what_is_above(rows: list[ActorRow], text: str) -> None:
    matches = [
        row.path for row in rows if text.lower() in f"{row.path}\n{row.actor_class}\n{row.state}".lower()
    ]
    above = [row.path for row in rows if any(f"{path}/".startswith(f"{row.path}/") for path in matches)]
    lines = lines_of(rows, View(filter=text, folded={"s"} if text else set()))
    assert paths(lines) == above
    assert [line.row.path for line in lines if line.is_match] == matches
    flat = lines_of(rows, View(filter=text, sort="rate"))
    assert sorted(paths(flat)) == sorted(matches)


@given(trees(), st.sampled_from(list(SORTS)[1:]))
def test_an_order_is_by_number_and_then_by_the_tree(rows: list[ActorRow], sort: str) -> None:
    lines = lines_of(rows, View(sort=sort))
    numbers = {
        "rate": lambda row: row.rate,
        "queue": lambda row: row.mailbox_depth,
        "failed": lambda row: row.failed,
        "p99": lambda row: row.p99 or 0,
    }
    value = numbers.get(sort, lambda _: 0)
    assert [line.row for line in lines] == sorted(rows, key=lambda row: -value(row))
    assert all(line.label == line.row.path for line in lines)


@given(trees(), st.data())
def test_what_is_folded_is_hidden_and_counted(rows: list[ActorRow], data: st.DataObject) -> None:
    folded = data.draw(st.sets(st.sampled_from([row.path for row in rows]), max_size=3))
    hidden = {row.path for row in rows for path in folded if row.path.startswith(f"{path}/")}
    lines = lines_of(rows, View(folded=folded))
    assert paths(lines) == [row.path for row in rows if row.path not in hidden]
    for line in lines:
        below = [row for row in rows if row.path.startswith(f"{line.row.path}/")]
        assert line.hidden == (len(below) if line.row.path in folded else 0)


@given(
    trees(),
    st.integers(1, 8),
    st.lists(st.sampled_from(["up", "down", "page up", "page down", "home", "end", "enter", "s", "S"])),
)
def test_the_selected_line_is_visible(rows: list[ActorRow], room: int, keys: list[str]) -> None:
    view = View()
    for key in ["down", *keys]:
        shown = view.lines(snapshot(rows), room)
        assert view.selected in paths(shown)
        # No room is left empty while there is more to show.
        assert len(shown) == min(room, view.count)
        view.press(key)


def test_moving() -> None:
    view = View()
    seen = []
    for key in ("down", "j", "up", "k", "end", "down", "home", "up", "page down", "G", "page up", "g"):
        view.lines(SHOP, 3)
        view.press(key)
        seen.append(view.selected)
    all_paths = [row.path for row in SHOP.actors]
    assert [all_paths.index(path or "") for path in seen] == [1, 2, 1, 0, 6, 6, 0, 0, 3, 6, 3, 0]


def test_keys_that_come_before_the_next_drawing() -> None:
    view = View(sort="restarts")
    view.lines(SHOP, 10)
    for key in ("s", "down", "down", "enter"):
        view.press(key)
    assert view.folded == {"shop/cpu:0"}


def test_typing_a_filter() -> None:
    view = View()
    for key in ("/", "q", "s", "backspace", "ü", "page up"):
        view.press(key)
    assert (view.filter, view.is_typing, view.is_over) == ("qü", True, False)
    view.press("enter")
    assert (view.filter, view.is_typing) == ("qü", False)
    view.press("/")
    view.press("erase")
    assert (view.filter, view.is_typing) == ("", True)
    view.press("x")
    view.press("escape")
    assert (view.filter, view.is_typing) == ("", False)
    view.press("q")
    assert view.is_over


def test_the_selected_actor_may_end() -> None:
    view = View()
    view.lines(SHOP, 10)
    for _ in range(4):
        view.press("down")
    assert view.selected == "shop/cpu:0/context/blas"
    fewer = snapshot([row for row in SHOP.actors if not row.path.endswith("/blas")])
    assert "shop/cpu:0/context/fft" in paths(view.lines(fewer, 10))
    assert view.selected == "shop/cpu:0/context/fft"
    assert list(view.lines(snapshot([]), 10)) == []
    assert view.selected is None
    view.press("enter")
    view.lines(SHOP, 10)
    assert view.selected == "shop"


def test_pages_come_and_go_by_their_keys() -> None:
    view = View()
    for key, page in (
        ("e", "failures"),
        ("o", "operations"),
        ("o", None),
        ("l", "libraries"),
        ("?", "help"),
        ("escape", None),
    ):
        view.press(key)
        assert view.page == page
    view.press("e")
    view.scrolled(100, 10)
    view.press("end")
    assert view.scrolled(100, 10) == 90
    view.press("page up")
    assert view.scrolled(100, 10) == 80
    view.press("home")
    assert view.scrolled(100, 10) == 0
    assert view.scrolled(5, 10) == 0


def test_a_tree_deeper_than_the_stack() -> None:
    rows = [
        ActorRow(path="/".join(["s"] * depth), actor_class="A", state="running") for depth in range(1, 3000)
    ]
    assert len(lines_of(rows, View())) == 2999
    [line] = lines_of(rows, View(folded={"s"}))
    assert line.hidden == 2998


def test_an_actor_whose_parent_is_missing_is_shown() -> None:
    rows = [ActorRow(path="s/gone/x", actor_class="A", state="running")]
    [line] = lines_of(rows, View())
    assert (line.row, line.before, line.label, line.hidden, line.is_match) == (rows[0], "", "x", 0, True)


@pytest.mark.parametrize("sort", list(SORTS)[1:])
def test_nothing_is_folded_where_there_is_no_tree(sort: str) -> None:
    view = View(sort=sort)
    view.lines(SHOP, 10)
    view.press("enter")
    assert view.folded == set()
