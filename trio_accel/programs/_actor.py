"""The actor of a program."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ..actors import ActorContext
from ..backends.base.contract.program_definition import ProgramDefinition
from ..devices import LibraryActor, OwnSupervision

__all__ = ["PATH", "ProgramActor"]

PATH = "trio_accel.programs:ProgramActor"
"""Its import path; a program's definition is the argument."""


class ProgramActor(LibraryActor):
    """Serves the calls of one program, on a stream of its own.

    A new incarnation has a new instance of the program's class. Where calls fail more often than the
    program's intensity allows, it ends alone.
    """

    library = "program"
    hands_ahead = True

    @classmethod
    def supervision(cls, argument: str) -> OwnSupervision:
        """Return what the program's definition says."""
        definition = ProgramDefinition.decode(argument)
        return OwnSupervision(
            name=definition.name, intensity=definition.intensity, backoff=definition.backoff
        )

    @classmethod
    def blocks_of(cls, argument: str) -> tuple[int, ...]:
        """Return those of the arrays that its constructor gets."""
        return tuple(dict.fromkeys(array.block for array in ProgramDefinition.decode(argument).arrays))

    @classmethod
    def modules_of(cls, argument: str) -> tuple[str, ...]:
        """That of its class or function."""
        return (ProgramDefinition.decode(argument).target.partition(":")[0],)

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold an instance; after a crash the next one is made when the last call of this one is over."""
        async with super().lifespan(context):
            try:
                yield
            except Exception:
                await self._engine.synchronize(context.path)  # noqa: ASYNC120  # who cancels it needs no error
                raise
