"""What the launcher of a system imports ahead for its programs, whichever process it is."""

from __future__ import annotations

import itertools
import logging

import attrs
import trio

from ....backends import driver_checks
from ....backends.base import NotSupportedError
from ._link import LauncherLink, Report
from ._program import interpreter_options

__all__ = ["ImportsAhead"]

# A launcher that has died twice while a module was to be imported may have died of it.
_MOST_DEATHS = 2
_logger = logging.getLogger("trio_accel.devices")


@attrs.define(eq=False)
class _Module:
    """A module that is to be imported.

    Attributes:
        name: Its name.
        preload: What is imported before it.
        number: Of the order that is not answered; 0 if there is none.
        is_importing: Whether the launcher itself is importing it: it has passed its trial.
        deaths: How many launchers in a row have died before they had it.
        is_refused: Whether it is not to be imported by any launcher.
        is_over: Set when the first launcher has it, or it is refused.
    """

    name: str
    preload: tuple[str, ...]
    number: int = 0
    is_importing: bool = False
    deaths: int = 0
    is_refused: bool = False
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

    def want(self, name: str, preload: tuple[str, ...]) -> trio.Event:
        """Have a module imported, unless it was asked for before.

        Args:
            name: The module, which workers find by the `sys.path` of this program.
            preload: What is imported before it, as in `StartWorker`.

        Returns:
            What is set when the launcher has it, or a warning has said why it will not.
        """
        module = self._modules.get(name)
        if module is None:
            module = self._modules[name] = _Module(name, preload)
            self._order(module)
        return module.is_over

    def begin(self, link: LauncherLink) -> None:
        """Go on with a new process: it has imported nothing."""
        self._link = link
        for module in self._modules.values():
            self._order(module)

    def end(self, how: str) -> None:
        """The process is at its end."""
        self._link = None
        for module in self._modules.values():
            if module.number:
                module.deaths += 1
                if module.is_importing or module.deaths >= _MOST_DEATHS:
                    self._refuse(module, f"the launcher of worker processes {how} meanwhile")
                module.number, module.is_importing = 0, False

    def take(self, report: Report) -> None:
        """Take what the process says of one."""
        module = next(module for module in self._modules.values() if module.number == report.number)
        if report.kind == "importing":
            module.is_importing = True
            return
        module.number, module.is_importing, module.deaths = 0, False, 0
        if report.kind == "imported":
            module.is_over.set()
        else:
            self._refuse(module, str(report.detail))

    def _order(self, module: _Module) -> None:
        if self._link is None or module.is_refused:
            return
        number = next(self._numbers)
        try:
            self._link.order(
                "import",
                number,
                [*interpreter_options(), "-c", ""],
                preload=module.preload,
                module=module.name,
                checks=driver_checks(),
            )
        except (OSError, NotSupportedError) as error:
            self._refuse(module, str(error))
        else:
            module.number = number
            self._link.ask()

    def _refuse(self, module: _Module, why: str) -> None:
        module.is_refused = True
        module.is_over.set()
        _logger.warning(
            "module %s is not imported ahead, so each worker that needs it takes longer to start: %s",
            module.name,
            why,
        )
