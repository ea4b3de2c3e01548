"""Entities with a home on one of several nodes, by key; durable ones continue after the loss of a node."""

from .._names import export as _export
from ._agent import *
from ._cluster import *
from ._durable import *
from ._entities import *
from ._errors import *
from ._members import *
from ._nodes import *
from ._options import *
from ._ray_nodes import *
from ._sqlite_store import *
from ._store import *
from ._table import *

_export(__name__)
