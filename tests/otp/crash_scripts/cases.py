"""Scripts written by hand: each shows one thing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

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
    Wait,
    Worker,
)

__all__ = ["WINDOWS", "cases"]

_STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)
_GROUP_STRATEGIES = _STRATEGIES[1:]
_RESTARTS: tuple[RestartName, ...] = get_args(RestartName)


def cases() -> dict[str, Script]:
    """All scripts that take no time, by name."""
    parts = (
        _kinds,
        _siblings,
        _intensity,
        _dynamic,
        _nested,
        _start_failures,
        _together,
        _during_restart,
        _ends,
    )
    found = [case for part in parts for case in part()]
    named = dict(found)
    if len(named) != len(found):
        raise ValueError("two cases have one name")
    return named


def _script(
    strategy: StrategyName, children: tuple[Child, ...], *steps: Step, intensity: int = 3, period: int = 3600
) -> Script:
    return Script(Supervisor("root", children, strategy, intensity, period), steps)


def _workers(names: str, restart: RestartName = "permanent") -> tuple[Worker, ...]:
    return tuple(Worker(name, restart) for name in names)


def _kinds() -> Iterator[tuple[str, Script]]:
    """Every strategy, restart type and end, of the middle one of three, twice."""
    for strategy in _STRATEGIES:
        for restart in _RESTARTS:
            for act in (Crash("b"), Finish("b")):
                children = (Worker("a"), Worker("b", restart), Worker("c"))
                yield f"{strategy}-{restart}-{type(act).__name__}", _script(strategy, children, act, act)


def _siblings() -> Iterator[tuple[str, Script]]:
    """Siblings of every restart type, of the first, the middle and the last that crash."""
    for strategy in _STRATEGIES:
        for restart in _RESTARTS:
            children = (Worker("a"), Worker("b", restart), Worker("c"), Worker("d", restart))
            steps = (Crash("a"), Crash("c"), Crash("b"), Crash("d"))
            yield f"{strategy}-{restart}-siblings", _script(strategy, children, *steps, intensity=4)


def _intensity() -> Iterator[tuple[str, Script]]:
    """As many restarts as allowed, and one more; counted and uncounted ones."""
    for strategy in _STRATEGIES:
        for allowed in (0, 1, 2, 5):
            crashes = [Crash("ab"[turn % 2]) for turn in range(allowed)]
            children = _workers("abc")
            yield f"{strategy}-allows-{allowed}", _script(strategy, children, *crashes, intensity=allowed)
            more = (*crashes, Crash("b"), Crash("a"))
            yield (
                f"{strategy}-allows-no-more-than-{allowed}",
                _script(strategy, children, *more, intensity=allowed),
            )
        children = (Worker("a"), Worker("t", "temporary"), Worker("f", "transient"), Worker("b"))
        steps: list[Step] = [Crash("t"), Finish("f"), Finish("a"), Crash("b"), Crash("a")]
        yield (
            f"{strategy}-temporary-and-finished-do-not-count",
            _script(strategy, children, *steps, intensity=2),
        )


def _dynamic() -> Iterator[tuple[str, Script]]:
    for strategy in _STRATEGIES:
        for restart in _RESTARTS:
            steps: list[Step] = [Add("root", Worker("x", restart)), Add("root", Worker("y", restart))]
            steps += [Crash("a"), Crash("x"), Add("root", Worker("z")), Finish("x"), Crash("z"), Crash("y")]
            script = _script(strategy, _workers("ab"), *steps, intensity=9)
            yield f"{strategy}-{restart}-dynamic", script
        steps = [Remove("a"), Crash("b"), Add("root", Worker("a")), Crash("b"), Remove("c"), Remove("c")]
        steps += [Crash("a"), Add("root", Worker("a")), Crash("a")]
        yield f"{strategy}-removed-and-added-again", _script(strategy, _workers("abc"), *steps, intensity=9)
        steps = [
            Add("root", Worker("x", fails=(0,))),
            Crash("a"),
            Add("root", Worker("x", fails=(0,))),
            Crash("x"),
        ]
        yield f"{strategy}-dynamic-that-fails-to-start", _script(strategy, _workers("a"), *steps)


def _nested() -> Iterator[tuple[str, Script]]:
    for outer in _STRATEGIES:
        for inner in _STRATEGIES:
            group = Supervisor("n", _workers("xyz"), inner, intensity=1)
            steps: list[Step] = [
                Crash("y"),
                Crash("x"),
                Crash("y"),
                Crash("a"),
                Crash("z"),
                Crash("z"),
                Crash("x"),
            ]
            children = (Worker("a"), group, Worker("b"))
            yield f"{outer}-over-{inner}", _script(outer, children, *steps, intensity=4)
            yield f"{outer}-over-{inner}-escalates", _script(outer, children, *steps, intensity=1)
        group = Supervisor("n", _workers("xy"), intensity=0, restart="temporary")
        steps = [
            Crash("a"),
            Crash("x"),
            Crash("a"),
            Crash("x"),
            Add("n", Worker("z")),
            Add("root", group),
            Crash("y"),
        ]
        yield f"{outer}-over-temporary", _script(outer, (Worker("a"), group, Worker("b")), *steps)
        deep = Supervisor("m", (Supervisor("n", _workers("xy"), intensity=0), Worker("z")), intensity=1)
        steps = [Crash("y"), Crash("x"), Crash("z"), Crash("x"), Crash("y"), Crash("x")]
        yield f"{outer}-over-two-levels", _script(outer, (Worker("a"), deep), *steps, intensity=1)
        group = Supervisor("n", _workers("xy"), outer, intensity=1)
        steps = [
            Add("n", Worker("d")),
            Crash("x"),
            Crash("d"),
            Crash("d"),
            Add("n", Worker("d")),
            Crash("y"),
            Remove("n"),
        ]
        steps += [Crash("x"), Add("root", group), Crash("y")]
        yield f"{outer}-with-dynamic-below", _script("one_for_one", (group, Worker("a")), *steps)


def _start_failures() -> Iterator[tuple[str, Script]]:
    """Starts that fail while restarting are tried again, and each try counts."""
    for strategy in _STRATEGIES:
        for allowed in (2, 3, 4):
            children = (Worker("a"), Worker("b", fails=(1, 2)), Worker("c"))
            yield (
                f"{strategy}-fails-to-restart-{allowed}",
                _script(strategy, children, Crash("b"), intensity=allowed),
            )
            yield (
                f"{strategy}-sibling-fails-{allowed}",
                _script(strategy, children, Crash("a"), intensity=allowed),
            )
        children = (Worker("a", fails=(2,)), Worker("b", fails=(1,)), Worker("c", fails=(1, 3)))
        yield f"{strategy}-all-fail", _script(strategy, children, Crash("a"), Crash("c"), intensity=9)
        for restart in _RESTARTS:
            children = (Worker("a"), Worker("b", restart, fails=(1,)), Worker("c"))
            steps = (Crash("b"), Crash("a"), Crash("b"))
            yield f"{strategy}-{restart}-fails-to-restart", _script(strategy, children, *steps, intensity=4)
        group = Supervisor("n", (Worker("x"), Worker("y", fails=(1, 2)), Worker("z")), intensity=0)
        around = (Worker("a"), group, Worker("b"))
        yield f"{strategy}-nested-fails-to-restart", _script(strategy, around, Crash("x"), Crash("z"))
        yield f"{strategy}-nested-gives-up-restarting", _script(strategy, around, Crash("x"), intensity=2)
    children = (Worker("a"), Worker("b", fails=(0,)), Worker("c"))
    yield "fails-to-start", _script("one_for_one", children, Crash("a"))
    group = Supervisor("n", children)
    yield "nested-fails-to-start", _script("one_for_one", (Worker("d"), group, Worker("e")))
    yield (
        "dynamic-nested-fails-to-start",
        _script("one_for_all", (Worker("d"),), Add("root", group), Crash("d")),
    )


def _together() -> Iterator[tuple[str, Script]]:
    """Two that end before their supervisor takes notice of the first, in both orders."""
    for strategy in _STRATEGIES:
        for names in ("ac", "ca", "bc", "dab"):
            for allowed in (1, 2, 3):
                steps = (Together(tuple(Crash(name) for name in names)), Crash("b"))
                yield (
                    f"{strategy}-{names}-{allowed}",
                    _script(strategy, _workers("abcd"), *steps, intensity=allowed),
                )
        children = (Worker("a"), Worker("b", "temporary"), Worker("c"))
        pairs: list[tuple[Act, Act]] = [
            (Crash("b"), Crash("a")),
            (Crash("c"), Crash("b")),
            (Finish("a"), Finish("b")),
        ]
        for first, second in pairs:
            name = f"{first.target}{second.target}-{type(first).__name__}"
            yield (
                f"{strategy}-temporary-{name}",
                _script(strategy, children, Together((first, second)), Crash("c")),
            )
    children = (Worker("a"), Worker("b", "transient"), Worker("c"))
    yield (
        "one_for_one-transient",
        _script("one_for_one", children, Together((Finish("b"), Crash("a"))), Crash("c")),
    )


def _during_restart() -> Iterator[tuple[str, Script]]:
    """A sibling that ends on its own while others are ended, or while others start."""
    for strategy in _GROUP_STRATEGIES:
        for act in (Crash("b"), Finish("b")):
            name = f"{strategy}-{type(act).__name__}"
            for restart in _RESTARTS:
                if restart == "transient" and isinstance(act, Finish):
                    # One of the differences in the README.
                    continue
                two: tuple[Child, ...] = (Worker("a"), Worker("b", restart))
                ending = (*two, Worker("c", hooks=(Hook("shutdown", 0, act),)))
                steps = (Crash("a"), Crash("c"), Crash("b"))
                yield f"{name}-{restart}-while-ending", _script(strategy, ending, *steps)
                starting = (*two, Worker("c", hooks=(Hook("start", 1, act),)), Worker("d"))
                yield f"{name}-{restart}-while-starting", _script(strategy, starting, Crash("a"), Crash("b"))
                added = Add("root", Worker("d", hooks=(Hook("start", 0, act),)))
                yield f"{name}-{restart}-while-one-is-added", _script(strategy, two, added, Crash("a"))
            yield from _during_failed_restart(name, strategy, act)


def _during_failed_restart(name: str, strategy: StrategyName, act: Act) -> Iterator[tuple[str, Script]]:
    """The second ends on its own while a restart gets into trouble, or has finished."""
    two = _workers("ab")
    starting = (*two, Worker("c", hooks=(Hook("start", 1, act),)), Worker("d"))
    yield f"{name}-while-starting-too-often", _script(strategy, starting, Crash("a"), intensity=1)
    failing = (*two, Worker("c", fails=(1,), hooks=(Hook("start", 1, act),)), Worker("d"))
    yield f"{name}-while-failing-to-start", _script(strategy, failing, Crash("a"), Crash("c"))
    added = Add("root", Worker("d", fails=(0,), hooks=(Hook("start", 0, act),)))
    yield f"{name}-while-an-added-child-fails", _script(strategy, two, added, Crash("a"))
    # The fourth fails too, and waits for the third, at which the restart of the second gets stuck.
    third = Worker("c", fails=(2,), hooks=(Hook("start", 1, act),))
    stuck = (*two, third, Worker("d", fails=(1,)), Worker("e"))
    yield f"{name}-stuck", _script(strategy, stuck, Crash("b"), Crash("b"), intensity=9)
    # Both the third, which fails to start, and the second, which ends meanwhile, are one too many.
    doomed = (*two, Worker("c", fails=(1, 2), hooks=(Hook("start", 2, act),)))
    yield f"{name}-gives-up-twice-over", _script(strategy, doomed, Crash("b"), intensity=2)
    above = (*two, Worker("c"), Worker("d", hooks=(Hook("shutdown", 0, act),)))
    yield f"{name}-above-while-ending", _script(strategy, above, Crash("c"), Crash("a"))
    ending = (*two, Worker("c", hooks=(Hook("shutdown", 0, act),)))
    nested = (Worker("x"), Supervisor("n", ending, strategy), Worker("y"))
    yield f"{name}-while-nested-ends", _script(strategy, nested, Crash("x"), Crash("x"))


def _ends() -> Iterator[tuple[str, Script]]:
    """Reverse start order at the end, whatever happened before."""
    for strategy in _STRATEGIES:
        deep = Supervisor("m", (Worker("p"), Supervisor("n", _workers("xy")), Worker("q")))
        children = (Worker("a"), deep, Worker("b", "temporary"), Worker("c", "transient"))
        steps: list[Step] = [
            Add("m", Worker("r")),
            Add("n", Worker("z", "temporary")),
            Add("root", Worker("d")),
        ]
        yield f"{strategy}-ends", _script(strategy, children, *steps)
        yield f"{strategy}-ends-after-a-crash", _script(strategy, children, *steps, Crash("a"))
        yield f"{strategy}-ends-a-branch", _script(strategy, children, *steps, Remove("m"), Crash("a"))
        hooks = (Hook("shutdown", 0, Crash("a")), Hook("shutdown", 0, Finish("b")))
        yield (
            f"{strategy}-ends-while-others-end",
            _script(strategy, (*_workers("ab"), Worker("c", hooks=hooks))),
        )


def _windows() -> Iterator[Script]:
    for strategy in _STRATEGIES:
        crashes: tuple[Step, ...] = (Crash("a"), Crash("b"))
        # Two restarts within two seconds; by the second pair the first has left the window.
        yield _script(
            strategy, _workers("abc"), *crashes, Wait(3.5), *crashes, Crash("a"), intensity=2, period=2
        )
        # They have not left the window of an hour.
        yield _script(strategy, _workers("abc"), *crashes, Wait(3.5), *crashes, intensity=2)


WINDOWS = tuple(_windows())
"""Scripts that wait for an intensity's window to pass: on OTP in earnest, since it has no clock to set."""
