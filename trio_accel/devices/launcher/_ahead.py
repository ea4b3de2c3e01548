"""Modules that the launcher of a system imports ahead for its programs, in each of its processes."""

from __future__ import annotations

import itertools
import logging
from typing import Any, Literal

import attrs
import trio

from ...backends import driver_checks
from ...backends.base import NotSupportedError
from ._link import LauncherLink, Report

__all__ = ["ImportsAhead", "Judgement"]

# A launcher that has died twice while a module was to be imported may have died of it.
_MOST_DEATHS = 2
_logger = logging.getLogger("trio_accel.devices")


@attrs.frozen
class Judgement:
    """Outcome of importing a module ahead.

    Attributes:
        module: Its name.
        ahead: Whether workers begin with it: ``"fully"``; ``"partly"``, with what it imports from other
            packages, as far as that is no obstacle; or ``"refused"``, not at all.
        culprit: The package that is the obstacle, where one was found.
        reason: The obstacle; None if there is none.
        seconds: How long its trial and import have taken. A worker needs up to as long for modules that are
            not imported ahead.
    """

    module: str
    ahead: Literal["fully", "partly", "refused"]
    culprit: str | None = None
    reason: str | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.ahead == "fully":
            return f"module {self.module} is imported ahead"
        how = "imported ahead only in part" if self.ahead == "partly" else "not imported ahead"
        longer = f"up to {self.seconds:.1f} s longer" if self.seconds >= 0.05 else "longer"
        return (
            f"module {self.module} is {how}, so each worker that needs it takes {longer} to start: {self.why}"
        )

    @property
    def why(self) -> str:
        """The obstacle in words, with the package that it comes from."""
        why = self.reason or ""
        if self.culprit is not None and self.culprit != self.module:
            why = why.replace("its import", f"the import of {self.culprit}")
        return why


@attrs.define(eq=False)
class _Module:
    """A module that is to be imported.

    Attributes:
        name: Its name.
        preload: Modules that are imported before it.
        number: Of the order that is not answered; 0 if there is none.
        deaths: How many launchers in a row have died before they had it.
        is_trusted: Whether leftovers of its import are no obstacle.
        judgement: Its outcome, once that is known.
        is_over: Set when the first launcher has it, or it is refused.
    """

    name: str
    preload: tuple[str, ...]
    number: int = 0
    deaths: int = 0
    is_trusted: bool = False
    judgement: Judgement | None = None
    is_over: trio.Event = attrs.field(factory=trio.Event)


class ImportsAhead:
    """Modules that every launcher process of a system imports, after the first workers that wait for it."""

    def __init__(self) -> None:
        self._link: LauncherLink | None = None
        self._numbers = itertools.count(1)
        self._modules: dict[str, _Module] = {}

    @property
    def is_pending(self) -> bool:
        """Whether the launcher is still to say what became of one."""
        return any(module.number for module in self._modules.values())

    @property
    def judgements(self) -> dict[str, Judgement]:
        """Return the outcomes of modules that are known."""
        return {name: each.judgement for name, each in self._modules.items() if each.judgement is not None}

    def want(self, name: str, preload: tuple[str, ...], *, is_trusted: bool = False) -> trio.Event:
        """Have a module imported, unless it was asked for before.

        Args:
            name: The module, which workers find by the `sys.path` of this program.
            preload: Modules that are imported before it, as in `StartWorker`.
            is_trusted: Whether leftovers of its import are no obstacle.

        Returns:
            An event that is set when the launcher has it, or a warning has said why it will not.
        """
        module = self._modules.get(name)
        if module is None:
            module = self._modules[name] = _Module(name, preload, is_trusted=is_trusted)
            self._order(module)
        return module.is_over

    def begin(self, link: LauncherLink) -> None:
        """Go on with a new process: it has imported nothing."""
        self._link = link
        for module in self._modules.values():
            self._order(module)

    def end(self, how: str) -> None:
        """End with the process."""
        self._link = None
        for module in self._modules.values():
            if module.number:
                module.deaths += 1
                if module.deaths >= _MOST_DEATHS:
                    self._refuse(module, f"the launcher of worker processes {how} meanwhile")
                module.number = 0

    def take(self, report: Report) -> None:
        """Take what the process says of one."""
        module = next(module for module in self._modules.values() if module.number == report.number)
        module.number, module.deaths = 0, 0
        detail: Any = report.detail
        self._judge(module, Judgement(module.name, **detail))

    def _order(self, module: _Module) -> None:
        if self._link is None or (module.judgement is not None and module.judgement.ahead == "refused"):
            return
        number = next(self._numbers)
        try:
            self._link.order(
                "import",
                number,
                ("-c", ""),
                preload=module.preload,
                module=module.name,
                checks=driver_checks(),
                trusted=module.is_trusted,
            )
        except (OSError, NotSupportedError) as error:
            self._refuse(module, str(error))
        else:
            module.number = number
            self._link.ask()

    def _refuse(self, module: _Module, why: str) -> None:
        self._judge(module, Judgement(module.name, "refused", reason=why))

    def _judge(self, module: _Module, judgement: Judgement) -> None:
        is_new = module.judgement is None or module.judgement.ahead != judgement.ahead
        module.judgement = judgement
        module.is_over.set()
        if is_new and judgement.ahead != "fully":
            _logger.warning("%s", judgement, extra={"is_untold": True})
