"""Scripts that ours is meant to run otherwise than OTP: the script, why, and both logs, OTP's on the left."""

from __future__ import annotations

import attrs

from .language import Add, Crash, Finish, Hook, Script, Supervisor, Worker
from .log import COLUMN

__all__ = ["DIFFERENCES", "Difference"]

_SETTLE = Crash("nobody")


@attrs.frozen
class Difference:
    """A script, and both logs as `side_by_side` draws them.

    Attributes:
        script: The script.
        logs: OTP's log in the left column, ours in the right one.
    """

    script: Script
    logs: str

    @property
    def otp(self) -> list[str]:
        """OTP's log."""
        return [left for row in self.logs.splitlines() if (left := row[:COLUMN].rstrip())]

    @property
    def ours(self) -> list[str]:
        """Our log."""
        return [right for row in self.logs.splitlines() if (right := row[COLUMN:])]


DIFFERENCES = {
    # A transient child that ended on its own has ended for good: all waiting callers were notified, and its
    # name is free. OTP keeps its specification, and starts it again with its siblings.
    "finished-is-finished": Difference(
        Script(
            Supervisor("root", (Worker("a"), Worker("b", "transient")), "one_for_all"),
            (Finish("b"), Crash("a")),
            forgets=False,
        ),
        """
root #0 started         root #0 started
a #0 started            a #0 started
b #0 started            b #0 started
b #0 finished           b #0 finished
a #0 crashed            a #0 crashed
a #1 started            a #1 started
b #1 started
b #1 was shut down
a #1 was shut down      a #1 was shut down
root #0 ended           root #0 ended
""",
    ),
    # The same, while its siblings are ended.
    "finished-while-siblings-end": Difference(
        Script(
            Supervisor(
                "root",
                (
                    Worker("a"),
                    Worker("b", "transient"),
                    Worker("c", hooks=(Hook("shutdown", 0, Finish("b")),)),
                ),
                "one_for_all",
            ),
            (Crash("a"),),
        ),
        """
root #0 started         root #0 started
a #0 started            a #0 started
b #0 started            b #0 started
c #0 started            c #0 started
a #0 crashed            a #0 crashed
c #0 was shut down      c #0 was shut down
b #0 finished           b #0 finished
a #1 started            a #1 started
b #1 started
c #1 started            c #1 started
c #1 was shut down      c #1 was shut down
b #1 was shut down
a #1 was shut down      a #1 was shut down
root #0 ended           root #0 ended
""",
    ),
    # Giving up is a failure. OTP's supervisor exits with the reason `shutdown`, after which a transient child
    # is not restarted: nobody notices the missing part of the program.
    "transient-supervisor-gives-up": Difference(
        Script(
            Supervisor(
                "root", (Worker("a"), Supervisor("n", (Worker("x"),), intensity=0, restart="transient"))
            ),
            (Crash("x"),),
        ),
        """
root #0 started         root #0 started
a #0 started            a #0 started
n #0 started            n #0 started
x #0 started            x #0 started
x #0 crashed            x #0 crashed
n #0 gave up            n #0 gave up
n #0 ended              n #0 ended
                        n #1 started
                        x #1 started
                        x #1 was shut down
                        n #1 ended
a #0 was shut down      a #0 was shut down
root #0 ended           root #0 ended
""",
    ),
    # Under one_for_one nothing waits for another child's start or back-off. OTP's supervisor is one
    # process, and starts one child after the other.
    "restarts-side-by-side": Difference(
        Script(
            Supervisor("root", (Worker("a"), Worker("b", hooks=(Hook("start", 1, Crash("a")),)))),
            (Crash("b"),),
        ),
        """
root #0 started         root #0 started
a #0 started            a #0 started
b #0 started            b #0 started
b #0 crashed            b #0 crashed
a #0 crashed            a #0 crashed
                        a #1 started
b #1 started            b #1 started
a #1 started
b #1 was shut down      b #1 was shut down
a #1 was shut down      a #1 was shut down
root #0 ended           root #0 ended
""",
    ),
    # An actor spawns its children one by one, so later children are not known yet, and a failure is handled
    # at once. OTP's supervisor first starts all children in its list.
    "crash-while-a-supervisor-starts": Difference(
        Script(
            Supervisor(
                "root",
                (
                    Supervisor(
                        "n",
                        (
                            Worker("a"),
                            Worker("b", hooks=(Hook("start", 0, Crash("a")),)),
                            Worker("c", hooks=(Hook("start", 0, _SETTLE),)),
                        ),
                        "one_for_all",
                    ),
                ),
            ),
            (_SETTLE,),
        ),
        """
root #0 started         root #0 started
n #0 started            n #0 started
a #0 started            a #0 started
a #0 crashed            a #0 crashed
b #0 started            b #0 started
c #0 started
c #0 was shut down
b #0 was shut down      b #0 was shut down
a #1 started            a #1 started
b #1 started            b #1 started
c #1 started
c #1 was shut down
                        c #0 started
                        c #0 was shut down
b #1 was shut down      b #1 was shut down
a #1 was shut down      a #1 was shut down
n #0 ended              n #0 ended
root #0 ended           root #0 ended
""",
    ),
    # A supervisor that gives up does not wait for a start. OTP's is not free before.
    "gives-up-while-a-child-starts": Difference(
        Script(
            Supervisor("root", (Worker("a"),), "one_for_all", intensity=0),
            (Add("root", Worker("b", hooks=(Hook("start", 0, Crash("a")),))),),
        ),
        """
root #0 started         root #0 started
a #0 started            a #0 started
a #0 crashed            a #0 crashed
b #0 started
root #0 gave up         root #0 gave up
b #0 was shut down
root #0 ended           root #0 ended
""",
    ),
}
