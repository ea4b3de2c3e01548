"""Random scripts. The README lists the omissions, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar, get_args

import attrs
from hypothesis import strategies as st

from .language import (
    Act,
    Add,
    Child,
    Crash,
    Finish,
    Hook,
    Remove,
    RestartName,
    Script,
    Step,
    StrategyName,
    Supervisor,
    Together,
    Worker,
)

__all__ = ["scripts"]

Value = TypeVar("Value")
_Draw: TypeAlias = st.DrawFn

_STRATEGIES = st.sampled_from(get_args(StrategyName))
_RESTARTS = st.sampled_from(get_args(RestartName))
# A transient supervisor that gave up is restarted by ours only.
_SUPERVISOR_RESTARTS: st.SearchStrategy[RestartName] = st.sampled_from(("permanent", "temporary"))
_MOST_STEPS = 12


@attrs.define
class _Names:
    """Names for the children of one script: the first children are ``a0``, ``a1`` and so on."""

    count: int = 0

    def take(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count - 1}"


@st.composite
def scripts(draw: _Draw) -> Script:
    """A tree of up to three levels, and up to twelve steps."""
    names = _Names()
    root = _draw_supervisor(draw, names, "root", levels=3, first=1)
    script = Script(root)
    for _ in range(draw(st.integers(0, _MOST_STEPS))):
        script = attrs.evolve(script, steps=(*script.steps, _draw_step(draw, names, script)))
    return script


def _draw_supervisor(draw: _Draw, names: _Names, name: str, *, levels: int, first: int) -> Supervisor:
    strategy = draw(_STRATEGIES)
    children: list[Child] = []
    for _ in range(draw(st.integers(1, 4))):
        if levels > 1 and draw(st.integers(0, 3)) == 3:
            child = _draw_supervisor(draw, names, names.take("s"), levels=levels - 1, first=1)
            children.append(attrs.evolve(child, restart=draw(_SUPERVISOR_RESTARTS)))
        else:
            children.append(
                _draw_worker(draw, names.take("a"), strategy, children, first, at_root=name == "root")
            )
    return Supervisor(name, tuple(children), strategy, draw(st.integers(0, 5)))


def _draw_worker(
    draw: _Draw, name: str, strategy: StrategyName, siblings: Sequence[Child], first: int, *, at_root: bool
) -> Worker:
    """A worker that fails, and does something, from its incarnation number `first` on."""
    fails = draw(st.sets(st.integers(first, 4), max_size=2)) if draw(st.booleans()) else set[int]()
    workers = [sibling for sibling in siblings if isinstance(sibling, Worker)]
    hooks: list[Hook] = []
    if workers and strategy != "one_for_one" and draw(st.integers(0, 2)) == 2:
        sibling = draw(st.sampled_from(workers))
        if at_root and draw(st.booleans()):
            hooks.append(Hook("start", draw(st.integers(1, 3)), _draw_act(draw, sibling, "transient")))
        else:
            hooks.append(Hook("shutdown", draw(st.integers(0, 3)), _draw_act(draw, sibling, "transient")))
    return Worker(name, draw(_RESTARTS), tuple(sorted(fails)), tuple(hooks))


def _draw_act(draw: _Draw, worker: Worker, never_finishes: RestartName | None = None) -> Act:
    may_finish = worker.restart != never_finishes
    return Finish(worker.name) if may_finish and draw(st.booleans()) else Crash(worker.name)


def _draw_step(draw: _Draw, names: _Names, script: Script) -> Step:
    supervisors, workers = _everyone(script)
    kind = draw(st.sampled_from(("act", "act", "act", "together", "together", "add", "remove")))
    if kind == "together":
        groups = [group for supervisor in supervisors if len(group := _together(script, supervisor)) > 1]
        if groups:
            group = draw(st.permutations(draw(st.sampled_from(groups))))
            chosen = group[: draw(st.integers(2, 3))]
            return Together(tuple(_draw_act(draw, worker, never) for worker, never in chosen))
    if kind == "add":
        return _draw_add(draw, names, script, supervisors)
    if kind == "remove":
        targets = [worker.name for worker in workers if not _has_hook(worker, "shutdown")]
        targets += [supervisor.name for supervisor in supervisors[1:]]
        if targets:
            return Remove(draw(st.sampled_from(targets)))
    return _draw_act(draw, draw(st.sampled_from(workers))) if workers else Crash("nobody")


def _draw_add(draw: _Draw, names: _Names, script: Script, supervisors: Sequence[Supervisor]) -> Add:
    supervisor = draw(st.sampled_from(supervisors))
    known = [child for parent, child in _with_parents(script) if parent == supervisor.name]
    is_again = draw(st.booleans())
    calm = [child for child in known if not _has_hook(child, "start")]
    if calm and is_again:
        return Add(supervisor.name, draw(st.sampled_from(calm)))
    if draw(st.integers(0, 4)) == 4:
        child = _draw_supervisor(draw, names, names.take("s"), levels=1, first=1)
        return Add(supervisor.name, attrs.evolve(child, restart=draw(_SUPERVISOR_RESTARTS)))
    at_root = supervisor.name == "root"
    worker = _draw_worker(draw, names.take("d"), supervisor.strategy, known, 0, at_root=at_root)
    return Add(supervisor.name, worker)


def _together(script: Script, supervisor: Supervisor) -> list[tuple[Worker, RestartName | None]]:
    """The workers that may end together; and which restart type of theirs never finishes then."""
    children = [child for parent, child in _with_parents(script) if parent == supervisor.name]
    if any(_is_eventful(child) for child in children):
        return []
    never: RestartName | None = None if supervisor.strategy == "one_for_one" else "transient"
    return [(child, never) for child in children if isinstance(child, Worker)]


def _is_eventful(child: Child) -> bool:
    """Whether a child, or one below it, fails to start or does something to a sibling."""
    if isinstance(child, Worker):
        return bool(child.fails or child.hooks)
    return any(map(_is_eventful, child.children))


def _with_parents(script: Script) -> list[tuple[str, Child]]:
    found: list[tuple[str, Child]] = []
    queue: list[tuple[str, Child]] = [(script.root.name, child) for child in script.root.children]
    queue += [(step.supervisor, step.child) for step in script.steps if isinstance(step, Add)]
    while queue:
        parent, child = queue.pop(0)
        if (parent, child) in found:
            continue
        found.append((parent, child))
        if isinstance(child, Supervisor):
            queue += [(child.name, below) for below in child.children]
    return found


def _everyone(script: Script) -> tuple[list[Supervisor], list[Worker]]:
    """All supervisors, the root first, and all workers, including those added below a supervisor."""
    children = [child for _, child in _with_parents(script)]
    supervisors = [script.root, *(child for child in children if isinstance(child, Supervisor))]
    return supervisors, [child for child in children if isinstance(child, Worker)]


def _has_hook(child: Child, point: str) -> bool:
    return isinstance(child, Worker) and any(hook.point == point for hook in child.hooks)
