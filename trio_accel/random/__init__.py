"""Random numbers on a device: generators, their messages, Sobol points, and the actor that serves them."""

import typing as _typing

from ..backends.base.contract.foreign_names import tells_of_missing as _tells_of_missing
from . import _generator, _messages, _sobol
from ._generator import *
from ._messages import *
from ._sobol import *

__all__: list[str] = []
__all__ += _generator.__all__
__all__ += _messages.__all__
__all__ += _sobol.__all__

if not _typing.TYPE_CHECKING:
    __getattr__ = _tells_of_missing(__name__)
