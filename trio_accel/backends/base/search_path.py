"""Where other processes of this program look for modules."""

from __future__ import annotations

import os
import sys

__all__ = ["search_path"]


def search_path() -> list[str]:
    """Give `sys.path` as a process that this one starts is to have it.

    An entry that is a path but no string becomes one; what is no path is left out. Entries that depend on the
    working directory, "" among them, come last: that directory may be another one by now, and what lies in it
    must never be taken for a module of the standard library or of an installed package.
    """
    entries = [text for entry in sys.path if (text := _text(entry)) is not None]
    return sorted(entries, key=lambda entry: not os.path.isabs(entry))


def _text(entry: object) -> str | None:
    try:
        # What else than strings is in the list, the list's type does not say.
        return os.fsdecode(entry)  # type: ignore[arg-type]
    except TypeError:
        return None
