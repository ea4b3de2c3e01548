"""Views of a running program for its operator: metrics, traces, logs, and a socket for other programs."""

from . import _dashboard, _gpus, _loop_watch, _metrics, _opentelemetry, _recorder, _snapshot, _socket, _traces
from ._dashboard import *
from ._gpus import *
from ._loop_watch import *
from ._metrics import *
from ._opentelemetry import *
from ._recorder import *
from ._snapshot import *
from ._socket import *
from ._traces import *

__all__: list[str] = []
__all__ += _dashboard.__all__
__all__ += _gpus.__all__
__all__ += _loop_watch.__all__
__all__ += _metrics.__all__
__all__ += _opentelemetry.__all__
__all__ += _recorder.__all__
__all__ += _snapshot.__all__
__all__ += _socket.__all__
__all__ += _traces.__all__
