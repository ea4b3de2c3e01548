"""View of ``trio-accel top``: the order, the filter, folded rows, the selected row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import attrs

from trio_accel.telemetry import ActorRow, SystemSnapshot

Page: TypeAlias = Literal["failures", "operations", "libraries", "readings", "help"]


SORTS: Mapping[str, Callable[[ActorRow], float] | None] = {
    "tree": None,
    "rate": lambda row: row.rate,
    "queue": lambda row: row.mailbox_depth + row.mailbox_waiting,
    "flight": lambda row: row.deferred,
    "p50": lambda row: row.p50 or 0.0,
    "p99": lambda row: row.p99 or 0.0,
    "failed": lambda row: row.failed,
    "restarts": lambda row: row.restarts,
}
"""Orders of the actors by their names on the command line, with what is sorted by, the largest first."""


@attrs.frozen(kw_only=True)
class Line:
    """An actor as it is listed.

    Attributes:
        row: Its figures.
        before: Text before its name: the lines of the tree.
        label: Its name, or its path where the order is not the tree's.
        hidden: Actors below it that are folded away.
        is_match: Whether the filter asks for it; otherwise something below it is asked for.
    """

    row: ActorRow
    before: str
    label: str
    hidden: int = 0
    is_match: bool = True


@attrs.define(kw_only=True, eq=False)
class View:
    """State that the keys have chosen.

    Attributes:
        sort: Name of the order, one of `SORTS`.
        filter: Text that the path, class or state of an actor has to contain.
        is_typing: Whether keys are added to the filter.
        is_paused: Whether newer snapshots are not shown.
        page: The page in place of the tree, if any.
        folded: Paths whose actors are hidden.
        selected: Path of the selected actor.
        top: The first line that is visible.
        is_over: Whether the user wants to leave.
    """

    sort: str = "tree"
    filter: str = ""
    is_typing: bool = False
    is_paused: bool = False
    page: Page | None = None
    folded: set[str] = attrs.field(factory=set[str])
    selected: str | None = None
    top: int = 0
    is_over: bool = False
    _index: int = attrs.field(default=0, init=False)
    _rows: Sequence[ActorRow] = attrs.field(default=(), init=False)
    _lines: Sequence[Line] = attrs.field(default=(), init=False)
    _room: int = attrs.field(default=1, init=False)
    _scroll: int = attrs.field(default=0, init=False)

    def lines(self, snapshot: SystemSnapshot, room: int) -> Sequence[Line]:
        """Return the lines that find room, with the selected one among them.

        Args:
            snapshot: The program.
            room: How many lines there is room for.
        """
        self._rows, self._room = snapshot.actors, max(1, room)
        self._list()
        most = len(self._lines) - self._room
        self.top = max(min(self.top, self._index, most), self._index - self._room + 1, 0)
        return self._lines[self.top : self.top + self._room]

    def scrolled(self, count: int, room: int) -> int:
        """Return the first line of a page of text that is visible, of ``count`` with room for ``room``."""
        self._room = max(1, room)
        self._scroll = max(0, min(self._scroll, count - room))
        return self._scroll

    @property
    def count(self) -> int:
        """The number of lines, visible or not."""
        return len(self._lines)

    def press(self, key: str) -> None:
        """Do what a key asks for."""
        if self.is_typing:
            self._type(key)
        elif (key := _SAME.get(key, key)) in _MOVES:
            # Keys may come faster than lines are drawn.
            self._list()
            self._move(key)
        elif key in _ACTIONS:
            _ACTIONS[key](self)

    def _type(self, key: str) -> None:
        if key in {"enter", "up", "down"}:
            self.is_typing = False
        elif key == "escape":
            self.is_typing, self.filter = False, ""
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif key == "erase":
            self.filter = ""
        elif len(key) == 1:
            self.filter += key

    def _move(self, key: str) -> None:
        step = _MOVES[key](self._room)
        if self.page is not None:
            self._scroll = max(0, self._scroll + step)
        else:
            self._select(self._index + step)

    def _list(self) -> None:
        """List the lines anew, with the same actor selected if it is among them."""
        self._lines = lines_of(self._rows, self)
        places = (place for place, line in enumerate(self._lines) if line.row.path == self.selected)
        self._select(next(places, self._index))

    def _select(self, index: int) -> None:
        self._index = max(0, min(index, len(self._lines) - 1))
        self.selected = self._lines[self._index].row.path if self._lines else None

    def show(self, page: Page) -> None:
        """Show a page in place of the tree, or the tree again if it is there."""
        self.page = None if self.page == page else page
        self._scroll = 0

    def back(self) -> None:
        """The tree, and all of it."""
        self.page, self.filter = None, ""

    def sort_by_next(self, step: int = 1) -> None:
        """Take the next order."""
        names = list(SORTS)
        self.sort = names[(names.index(self.sort) + step) % len(names)]
        self.top = self._index = 0
        self.selected = None

    def fold(self, is_folded: bool | None = None) -> None:
        """Hide what is below the selected actor, or show it; None does the other of the two."""
        if self.selected is None or self.sort != "tree":
            return
        if is_folded is None:
            is_folded = self.selected not in self.folded
        (self.folded.add if is_folded else self.folded.discard)(self.selected)


_FAR = 1 << 30
# Keys that do what another one does.
_SAME = {"k": "up", "j": "down", "g": "home", "G": "end", " ": "p", "h": "?", "f": "enter"}
_MOVES: Mapping[str, Callable[[int], int]] = {
    "up": lambda _: -1,
    "down": lambda _: 1,
    "page up": lambda room: -room,
    "page down": lambda room: room,
    "home": lambda _: -_FAR,
    "end": lambda _: _FAR,
}
_ACTIONS: Mapping[str, Callable[[View], None]] = {
    "q": lambda view: setattr(view, "is_over", True),
    "p": lambda view: setattr(view, "is_paused", not view.is_paused),
    "/": lambda view: setattr(view, "is_typing", True),
    "s": lambda view: view.sort_by_next(),
    "S": lambda view: view.sort_by_next(-1),
    "e": lambda view: view.show("failures"),
    "o": lambda view: view.show("operations"),
    "c": lambda view: view.show("readings"),
    "l": lambda view: view.show("libraries"),
    "?": lambda view: view.show("help"),
    "escape": lambda view: view.back(),
    "enter": lambda view: view.fold(),
    "left": lambda view: view.fold(True),
    "right": lambda view: view.fold(False),
}


def lines_of(rows: Sequence[ActorRow], view: View) -> Sequence[Line]:
    """Return all lines, in the order that is wanted."""
    if (value := SORTS[view.sort]) is not None:
        matches = [row for row in rows if _is_match(row, view.filter)]
        matches.sort(key=value, reverse=True)
        return [Line(row=row, before="", label=row.path) for row in matches]
    children: dict[str | None, list[ActorRow]] = {}
    there = {row.path for row in rows}
    for row in rows:
        children.setdefault(row.parent if row.parent in there else None, []).append(row)
    shown = _shown(rows, view.filter)
    # With a filter, what is asked for is shown wherever it is.
    folded = set[str]() if view.filter else view.folded
    return list(_tree(children, shown, folded, view.filter))


def _is_match(row: ActorRow, text: str) -> bool:
    sought = text.casefold()
    return any(sought in word.casefold() for word in (row.path, row.actor_class, row.state))


def _shown(rows: Sequence[ActorRow], text: str) -> set[str | None]:
    """Paths of what the filter asks for, and of all above."""
    shown: set[str | None] = set()
    # The climb starts from below, and goes by actors alone: to climb a stranger's path part by part may take
    # minutes.
    for row in reversed(rows):
        if row.path in shown or _is_match(row, text):
            shown |= {row.path, row.parent}
    return shown


def _tree(
    children: Mapping[str | None, Sequence[ActorRow]], shown: set[str | None], folded: set[str], text: str
) -> Iterator[Line]:
    def below(path: str | None) -> list[ActorRow]:
        return [row for row in children.get(path, ()) if row.path in shown]

    # A tree may be deeper than Python's stack.
    left = [(row, "", "") for row in reversed(below(None))]
    while left:
        row, before, rest = left.pop()
        inner = below(row.path)
        is_folded = row.path in folded and bool(inner)
        yield Line(
            row=row,
            before=before,
            label=row.name,
            hidden=_count(children, row.path) if is_folded else 0,
            is_match=_is_match(row, text),
        )
        if not is_folded:
            for child in reversed(inner):
                is_last = child is inner[-1]
                left.append(
                    (child, rest + ("└─ " if is_last else "├─ "), rest + ("   " if is_last else "│  "))
                )


def _count(children: Mapping[str | None, Sequence[ActorRow]], path: str) -> int:
    """Tell how many actors are below one."""
    count, left = 0, [path]
    while left:
        inner = children.get(left.pop(), ())
        count += len(inner)
        left += [row.path for row in inner]
    return count
