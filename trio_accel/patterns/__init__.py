"""Blueprints of services around devices: batches, replicas, fair shares, limits.

Each blueprint is an actor that serves `Submit`. Its model is an async callable, or the address of another
blueprint, so blueprints compose.
"""

from .._names import export as _export
from ._batcher import *
from ._cascade import *
from ._checks import *
from ._continuous import *
from ._fair_queue import *
from ._fair_scheduler import *
from ._hot_swap import *
from ._limits import *
from ._moe import *
from ._pages import *
from ._parameter_server import *
from ._parts import *
from ._pipeline import *
from ._router import *
from ._sequences import *
from ._speculative import *
from ._stacked import *
from ._submit import *
from ._waiting import *

_export(__name__)
