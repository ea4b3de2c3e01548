"""Views of a running program for its operator: metrics, traces, logs, and a page."""

from .._names import export as _export
from ._dashboard import *
from ._metrics import *
from ._opentelemetry import *
from ._recorder import *
from ._snapshot import *
from ._traces import *

_export(__name__)
