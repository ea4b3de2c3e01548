"""Parts of a program that can be unable to serve, such as a cluster without nodes, for its probes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeAlias
from weakref import WeakKeyDictionary

from ._system import ActorSystem

Fault: TypeAlias = Callable[[], str | None]
"""Returns why a part cannot serve now, or None if it can."""

_faults: WeakKeyDictionary[ActorSystem, dict[object, tuple[str, Fault]]] = WeakKeyDictionary()


@contextmanager
def part_of(system: ActorSystem, name: str, fault: Fault) -> Generator[None]:
    """Have the probes of a system ask a part, until the end of the block."""
    parts, key = _faults.setdefault(system, {}), object()
    parts[key] = name, fault
    try:
        yield
    finally:
        del parts[key]


def faults_of(system: ActorSystem) -> list[str]:
    """Return why parts of a system cannot serve now, with the names of the parts."""
    parts = [(name, fault()) for name, fault in _faults.get(system, {}).values()]
    return [f"{name}: {fault}" for name, fault in parts if fault is not None]
