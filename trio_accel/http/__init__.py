"""HTTP for a service: any ASGI application within limits, with isolated connections."""

from .._names import export as _export
from ._checks import *
from ._helpers import *
from ._limits import *
from ._serve import *

_export(__name__)
