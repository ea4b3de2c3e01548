"""Blueprints of services around devices: batches, replicas, fair shares, limits.

Each blueprint is an actor that serves `Call`. Its model is an async callable, or the address of another
blueprint, so blueprints compose.
"""

from . import (
    _batcher,
    _cascade,
    _checks,
    _fair_scheduler,
    _hot_swap,
    _limits,
    _moe,
    _pipeline,
    _router,
    _servants,
    _speculative,
    _stacked,
)
from ._batcher import *
from ._cascade import *
from ._checks import *
from ._fair_scheduler import *
from ._hot_swap import *
from ._limits import *
from ._moe import *
from ._pipeline import *
from ._router import *
from ._servants import *
from ._speculative import *
from ._stacked import *

__all__: list[str] = []
__all__ += _batcher.__all__
__all__ += _cascade.__all__
__all__ += _checks.__all__
__all__ += _fair_scheduler.__all__
__all__ += _hot_swap.__all__
__all__ += _limits.__all__
__all__ += _moe.__all__
__all__ += _pipeline.__all__
__all__ += _router.__all__
__all__ += _servants.__all__
__all__ += _speculative.__all__
__all__ += _stacked.__all__
