"""Waiting until a system has nothing more to do."""

from __future__ import annotations

from ..actors import System as ActorSystem

__all__ = ["wait_until_quiet"]


async def wait_until_quiet(system: ActorSystem) -> None:
    """Wait until no actor has a message queued, running or unanswered, and every task is blocked.

    What waits for time or for another thread counts as quiet only if no message is open over it:
    a request that a handler or a device is working on is waited for.
    """
    # It loads pytest where that is installed: not with `import trio_accel`.
    import trio.testing

    while True:
        await trio.testing.wait_all_tasks_blocked()
        if not any(
            node.mailbox_depth or node.mailbox_waiting or node.deferred or node.running
            for node in system.tree().walk()
        ):
            return
        # Somebody works outside the loop, or sleeps: let time pass.
        await trio.sleep(0.001)
