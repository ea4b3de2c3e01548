"""Which Trio run a call comes from: a system is of one run, and other threads and runs must not touch it."""

from __future__ import annotations

from threading import get_ident as thread_ident

__all__ = ["check_run", "foreign_reply", "thread_ident"]


def check_run(thread: int, verb: str, what: str) -> None:
    """Refuse another thread or Trio run, before it harms what is not made for it.

    A thread has one run at a time, so its number tells as much as the run's token, in a third of the time.

    Args:
        thread: That of the run.
        verb: What is called.
        what: What it is called for.

    Raises:
        RuntimeError: The calling thread is another.
    """
    if thread_ident() != thread:
        raise RuntimeError(
            f"{verb}: {what} belongs to another thread or Trio run; call it there, "
            "for example by trio.from_thread.run from a thread that the run has started"
        )


def foreign_reply(verb: str, operation: str, path: str) -> RuntimeError:
    """Make the error of a reply that is given in another thread than its actor's."""
    return RuntimeError(
        f"{verb}: the reply to {operation} of actor {path} belongs to another thread or Trio run, and is "
        f"still open; give it there: trio.from_thread.run_sync(reply.{verb}, ...) from a thread that the run "
        f"has started, or token.run_sync_soon(reply.{verb}, ...) from any other"
    )
