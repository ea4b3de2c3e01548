"""A module that workers are to begin with."""

from __future__ import annotations

import attrs

__all__ = ["Preload"]


def _module(instance: Preload, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"preload: a module is named by a string, got {value!r}")
    if value == "__main__" or not all(part.isidentifier() for part in value.split(".")):
        raise ValueError(f"preload: {value!r} is no name of a module that another process can import")


def _switch(instance: Preload, attribute: attrs.Attribute[bool], value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"Preload: {attribute.name} must be True or False, got {value!r}")


@attrs.frozen
class Preload:
    """A module that the launcher of workers imports ahead, for `DeviceOptions.preload`.

    Attributes:
        module: Its name.
        trusted: Whether workers may begin with it whatever its import leaves behind: threads, open files,
            handled signals. You know that a forked process can do without these. A worker that cannot may
            hang or crash. A module that initialises a driver or cannot be imported is refused all the same.
    """

    module: str = attrs.field(validator=_module)
    trusted: bool = attrs.field(default=False, kw_only=True, validator=_switch)
