"""Code of the user's that programs run: how it is found, what it holds, and errors that name it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any, cast

import attrs

from ....actors import ActorError
from ..contract.errors import AccelError


def load_target(path: str, where: str) -> Any:
    """Find the class or function of a program; blocks while its module is imported.

    Args:
        path: Import path, ``"package.module:Class"``.
        where: The program's name in errors.

    Raises:
        ImportError: There is no such module here, or it does not have it.
        Exception: The error of the module.
    """
    module, _, qualname = path.partition(":")
    with Named(f"{where}, at the import of {module}"):
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            text = f"{where}: module {module!r} cannot be imported here: {error}"
            raise ModuleNotFoundError(text, name=error.name, path=error.path) from error
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        text = f"{where}: module {module!r} has no {qualname}"
        raise ImportError(text, name=module)  # noqa: TRY004  # as if it were imported from there
    return found


def check_written(where: str, returned: object, out: object, outputs: Sequence[object]) -> None:
    """Refuse a returned value of a method that was to write to `out`: it would be lost."""
    own = {id(output) for output in outputs}
    if returned is not None and returned is not out and not all(id(item) in own for item in _items(returned)):
        raise TypeError(
            f"{where}: it was to write its result to out, and returned {shortened(returned)}; return out or "
            "None, or take no argument out: then what is returned is copied"
        )


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(cast("dict[object, object]", value).values())
    return list(cast("Sequence[object]", value)) if isinstance(value, (list, tuple)) else [value]


@cache
def takes_an_out(function: Callable[..., Any]) -> bool:
    """Tell whether a method takes the arrays that it is to write its result to."""
    return "out" in inspect.signature(function).parameters


def shortened(value: object) -> str:
    """Describe a value in a few words."""
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"  # pyright: ignore[reportUnknownArgumentType]
    return f"an object of type {type(value).__name__}"


def leaves_of(value: object, module: str = "") -> Iterator[object]:
    """Yield what nested collections hold, and the attributes of objects of classes of a module."""
    left, seen = [value], set[int]()
    while left:
        one: Any = left.pop()
        is_own = type(one).__module__ == module and hasattr(one, "__dict__")
        if not (is_own or issubclass(type(one), (dict, list, tuple))):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            inner = cast("Any", vars(one) if is_own else one)
            inside = inner.values() if isinstance(inner, dict) else inner  # pyright: ignore[reportUnknownVariableType]
            left += list(inside)  # pyright: ignore[reportUnknownArgumentType]


def note_where(error: Exception, where: str, undeclared: Callable[[], str]) -> None:
    """Name where an error comes from; a class of the user's may take no notes."""
    with suppress(Exception):
        error.add_note(f"in {where}")
        if "read-only" in str(error) and (advice := undeclared()):
            error.add_note(advice)


@attrs.frozen
class Named:
    """Names the code of the user's that an error comes from.

    `undeclared` says what to do about a write to a read-only array.

    Errors that the engine would take for its own, or that would end a task or the process, are wrapped.
    """

    where: str
    undeclared: Callable[[], str] = str

    def __enter__(self) -> None: ...

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        # The backend tells how much memory there is.
        if error is None or isinstance(error, MemoryError):
            return
        if isinstance(error, (AccelError, ActorError)) or not isinstance(error, Exception):
            text = f"{self.where} raised {type(error).__name__}: {error}"
            raise RuntimeError(text) from error  # noqa: TRY004  # it is not about a type
        note_where(error, self.where, self.undeclared)
