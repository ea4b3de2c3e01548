"""Typed, supervised actors on Trio tasks. Usable on their own, because nothing here depends on devices."""

from .._names import export as _export
from ._actor import *
from ._cell import *
from ._contexts import *
from ._direct import *
from ._errors import *
from ._events import *
from ._handlers import *
from ._leavable import *
from ._loop_watch import *
from ._messages import *
from ._numbers import *
from ._openings import *
from ._options import *
from ._outcomes import *
from ._ref import *
from ._system import *
from ._tree import *

_export(__name__)
