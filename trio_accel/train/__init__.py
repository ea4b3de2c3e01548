"""Training over a world of devices: steps that all ranks commit, or none."""

from .._names import export as _export
from ..gradients import grad as grad
from ..gradients import value_and_grad as value_and_grad
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

_export(__name__)
