"""The language of crash scripts: a tree of supervisors and workers, and what happens to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, Protocol, TypeAlias

import attrs

__all__ = [
    "Act",
    "Add",
    "Child",
    "Crash",
    "Finish",
    "Hook",
    "Remove",
    "Script",
    "Step",
    "Supervisor",
    "Together",
    "Wait",
    "Worker",
]

RestartName: TypeAlias = Literal["permanent", "transient", "temporary"]
StrategyName: TypeAlias = Literal["one_for_one", "one_for_all", "rest_for_one"]


class _Printer(Protocol):
    def text(self, text: str) -> object: ...


class _Term:
    """Base of all script parts: their `repr` is their code, without defaults."""

    __slots__ = ()

    def __repr__(self) -> str:
        fields: tuple[attrs.Attribute[object], ...] = attrs.fields(type(self))  # type: ignore[arg-type]
        values = [(field, getattr(self, field.name)) for field in fields]
        said = ", ".join(f"{field.name}={value!r}" for field, value in values if value != field.default)
        return f"{type(self).__name__}({said})"

    def _repr_pretty_(self, printer: _Printer, _cycle: bool) -> None:
        # Hypothesis prints by this.
        printer.text(repr(self))


@attrs.frozen(repr=False)
class Crash(_Term):
    """A worker fails."""

    target: str


@attrs.frozen(repr=False)
class Finish(_Term):
    """A worker ends on its own, without an error."""

    target: str


Act: TypeAlias = Crash | Finish


@attrs.frozen(repr=False)
class Hook(_Term):
    """The action of a worker on a sibling at one point in one of its incarnations, which it waits for.

    Attributes:
        point: ``"start"``: before it has started; ``"shutdown"``: when its supervisor ends it.
        number: In which of its incarnations, counted from 0 over the whole script.
        act: The action on the sibling. Nothing if the sibling is not running.
    """

    point: Literal["start", "shutdown"]
    number: int
    act: Act


@attrs.frozen(repr=False)
class Worker(_Term):
    """A child without children.

    Attributes:
        name: Its name, unique in the script.
        restart: Its restart type.
        fails: Which of its starts fail, counted from 0 over the whole script.
        hooks: Its actions on its siblings.
    """

    name: str
    restart: RestartName = "permanent"
    fails: tuple[int, ...] = ()
    hooks: tuple[Hook, ...] = ()


@attrs.frozen(repr=False)
class Supervisor(_Term):
    """A supervisor and the children that it starts with.

    Attributes:
        name: Its name, unique in the script.
        children: Its children in start order.
        strategy: Its strategy.
        intensity: The most restarts within the period.
        period: Seconds; long enough by default for the slowest script.
        restart: Its own restart type; of no meaning at the root.
    """

    name: str
    children: tuple[Child, ...] = ()
    strategy: StrategyName = "one_for_one"
    intensity: int = 3
    period: int = 3600
    restart: RestartName = "permanent"


Child: TypeAlias = Worker | Supervisor


@attrs.frozen(repr=False)
class Together(_Term):
    """Several siblings end, one after the other, before their supervisor takes notice of the first."""

    acts: tuple[Act, ...]


@attrs.frozen(repr=False)
class Add(_Term):
    """A child is started under a running supervisor; refused where the name is in use there."""

    supervisor: str
    child: Child


@attrs.frozen(repr=False)
class Remove(_Term):
    """A child is stopped for good."""

    target: str


@attrs.frozen(repr=False)
class Wait(_Term):
    """Time passes."""

    seconds: float


Step: TypeAlias = Crash | Finish | Together | Add | Remove | Wait


@attrs.frozen(repr=False)
class Script(_Term):
    """A tree and what happens to it, step by step.

    After each step everything comes to rest. A step with a target that is not running does nothing. In the
    end the root is stopped, if it has not given up before.

    Attributes:
        root: The tree.
        steps: The actions.
        forgets: Whether a transient child that ended on its own is forgotten, as ours always does. OTP's
            supervisor keeps its specification, so the reference deletes that; with False it is left there.
    """

    root: Supervisor
    steps: tuple[Step, ...] = ()
    forgets: bool = True

    def parents(self) -> Mapping[str, str]:
        """The supervisor of each child, by name."""
        added = [(step.supervisor, step.child) for step in self.steps if isinstance(step, Add)]
        parents: dict[str, str] = {}
        for parent, child in [
            *_below(self.root),
            *added,
            *(pair for _, top in added for pair in _below(top)),
        ]:
            if parents.setdefault(child.name, parent) != parent:
                raise ValueError(f"script: {child.name!r} is under {parents[child.name]!r} and {parent!r}")
        return parents


def _below(child: Child) -> Iterator[tuple[str, Child]]:
    if isinstance(child, Supervisor):
        for below in child.children:
            yield child.name, below
            yield from _below(below)
