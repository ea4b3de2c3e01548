"""Blueprints of services around devices: batches, replicas, fair shares, limits.

Each blueprint is an actor that serves `Call`. Its model is an async callable, or the address of another
blueprint, so blueprints compose.
"""

from . import (
    _admission,
    _batcher,
    _batches,
    _cascade,
    _deadline,
    _fair_scheduler,
    _hot_swap,
    _moe,
    _outputs,
    _pipeline,
    _pools,
    _results,
    _retry,
    _router,
    _servants,
    _speculative,
    _stacked,
)
from ._admission import *
from ._batcher import *
from ._batches import *
from ._cascade import *
from ._deadline import *
from ._fair_scheduler import *
from ._hot_swap import *
from ._moe import *
from ._outputs import *
from ._pipeline import *
from ._pools import *
from ._results import *
from ._retry import *
from ._router import *
from ._servants import *
from ._speculative import *
from ._stacked import *

__all__: list[str] = []
__all__ += _admission.__all__
__all__ += _batcher.__all__
__all__ += _batches.__all__
__all__ += _cascade.__all__
__all__ += _deadline.__all__
__all__ += _fair_scheduler.__all__
__all__ += _hot_swap.__all__
__all__ += _moe.__all__
__all__ += _outputs.__all__
__all__ += _pipeline.__all__
__all__ += _pools.__all__
__all__ += _results.__all__
__all__ += _retry.__all__
__all__ += _router.__all__
__all__ += _servants.__all__
__all__ += _speculative.__all__
__all__ += _stacked.__all__
