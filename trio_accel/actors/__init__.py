"""Typed, supervised actors on Trio tasks. Usable alone: nothing here knows of devices."""

from . import (
    _actor,
    _cell,
    _direct,
    _errors,
    _events,
    _handlers,
    _messages,
    _options,
    _outcomes,
    _ref,
    _system,
    _tree,
)
from ._actor import *
from ._cell import *
from ._direct import *
from ._errors import *
from ._events import *
from ._handlers import *
from ._messages import *
from ._options import *
from ._outcomes import *
from ._ref import *
from ._system import *
from ._tree import *

__all__: list[str] = []
__all__ += _actor.__all__
__all__ += _cell.__all__
__all__ += _direct.__all__
__all__ += _errors.__all__
__all__ += _events.__all__
__all__ += _handlers.__all__
__all__ += _messages.__all__
__all__ += _options.__all__
__all__ += _outcomes.__all__
__all__ += _ref.__all__
__all__ += _system.__all__
__all__ += _tree.__all__
