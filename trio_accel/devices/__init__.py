"""Devices as supervised actors: arrays, operations, completion."""

from .._names import export as _export
from ..backends.base.contract.values import in_range as in_range
from .base._options import *
from .base._port import *
from .base._progress import *
from .base._refusals import *
from .base._statistics import *
from .base._views import overlaps as overlaps
from .base._waits import run_together as run_together
from .engine._completer import cancel_grace as cancel_grace
from .engine._context import ContextActor as ContextActor
from .engine._library import *
from .front._bandwidth import *
from .front._device import *
from .front._group import *
from .front._memory import *
from .front._recording import *
from .front._steps import *
from .front._stream import *
from .front._system import *
from .launcher._launcher import describe_workers as describe_workers
from .operations._calls import *
from .operations._chain import *
from .operations._declared import *
from .operations._faults import *
from .operations._gather import *
from .operations._hooks import *
from .operations._operation import *
from .operations._pending import *
from .operations._plan_source import refuse_value as refuse_value
from .operations._ref import *
from .operations._updates import *

_export(__name__, instead="write ta.list_devices()")
