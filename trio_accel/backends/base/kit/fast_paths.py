"""Fast paths: what is done in a quicker way where that is possible, and can be turned off by tests.

Each leads to the same results as the path that is always there. They are looked at when a device or a worker
is opened, and not with each operation. Decision 98 has what each of them gains.
"""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class FastPaths:
    """The fast paths that are taken.

    Attributes:
        direct_launch: An operation is launched in its asker's task, past the mailbox of an idle library.
        reuse: A new array takes the id of a dropped block of its size.
        templates: A worker is told of the layouts of an operation once, and of its blocks each time.
        spin_wait: Tasks poll for what is due, and messages go through shared memory meanwhile.
        graphs: A repeated product is launched as a graph.
    """

    direct_launch: bool = True
    reuse: bool = True
    templates: bool = True
    spin_wait: bool = True
    graphs: bool = True

    @classmethod
    def none(cls) -> FastPaths:
        """Return the choice of none."""
        return cls(**dict.fromkeys((field.name for field in attrs.fields(cls)), False))


_current = FastPaths()


def current_fast_paths() -> FastPaths:
    """Return those of devices that are opened now; a worker has those of its device."""
    return _current


def use_fast_paths(paths: FastPaths) -> None:
    """Take these from now on, in this process."""
    global _current  # noqa: PLW0603  # the one setting
    _current = paths
