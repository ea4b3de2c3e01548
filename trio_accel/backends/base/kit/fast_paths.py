"""Fast paths: quicker ways to do the same, which tests can turn off.

Each leads to the same results as the general path. They are read when a device or a worker is opened, and not
with each operation. Decision 98 lists their gains.
"""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class FastPaths:
    """The enabled fast paths.

    Attributes:
        direct_launch: An operation is launched in its caller's task, bypassing the mailbox of an idle
            library.
        reuse: A new array takes the id of an equally large dropped block.
        templates: A worker gets the layouts of an operation once, and its blocks each time.
        spin_wait: Tasks poll for due events, and messages use shared memory meanwhile.
        graphs: A repeated product is launched as a graph.
    """

    direct_launch: bool = True
    reuse: bool = True
    templates: bool = True
    spin_wait: bool = True
    graphs: bool = True

    @classmethod
    def disabled(cls) -> FastPaths:
        """Return the choice of none."""
        return cls(**dict.fromkeys((field.name for field in attrs.fields(cls)), False))


_current = FastPaths()


def current_fast_paths() -> FastPaths:
    """Return the fast paths for devices that are opened now; a worker has the fast paths of its device."""
    return _current


def use_fast_paths(paths: FastPaths) -> None:
    """Take these from now on, in this process."""
    global _current  # noqa: PLW0603  # the one setting
    _current = paths
