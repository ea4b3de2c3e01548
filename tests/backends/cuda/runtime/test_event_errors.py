"""An event keeps its error, and nothing of the task that saw it first."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from trio_accel.backends.base import LibraryError

pytestmark = [pytest.mark.no_device, pytest.mark.usefixtures("only_cuda")]


class Held:
    """The objects of a task that looks for the end."""


def test_an_error_does_not_keep_its_readers_objects(rig: Any) -> None:
    def refuse() -> None:
        raise LibraryError("refused", library="test", code=1)

    rig.stream.after(refuse)
    event = rig.stream.record()

    def look() -> weakref.ref[Held]:
        held = Held()
        while not event.is_done:
            pass
        return weakref.ref(held)

    seen = look()
    assert isinstance(event.error, LibraryError)
    assert seen() is None
