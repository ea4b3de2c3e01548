"""Training over a world of devices: steps that all ranks commit, or none."""

import typing as _typing
from importlib import import_module as _import_module

from .._names import export as _export
from ._checkpoints import *
from ._config import *
from ._groups import *
from ._layout import *
from ._lora import *
from ._mesh import *
from ._module import *
from ._observers import *
from ._optimizers import *
from ._replicas import *
from ._trainer import *

if _typing.TYPE_CHECKING:
    from ..gradients import grad as grad
    from ..gradients import value_and_grad as value_and_grad
else:

    def __getattr__(name: str) -> object:
        """Import the gradients at their first use, because they are two thirds of this package's import."""
        if name in {"grad", "value_and_grad"}:
            return getattr(_import_module("trio_accel.gradients"), name)
        raise AttributeError(f"unknown name {__name__}.{name}: dir({__name__}) lists the names", name=name)


_export(__name__, "grad", "value_and_grad")
