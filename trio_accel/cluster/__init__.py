"""Entities at home on one of several nodes, by key; durable ones go on where they were."""

from .._names import export as _export
from ._agent import AgentConfig as AgentConfig
from ._agent import Started as Started
from ._cluster import *
from ._durable import *
from ._entities import Entity as Entity
from ._entities import Home as Home
from ._errors import *
from ._members import Member as Member
from ._nodes import *
from ._options import *
from ._ray_nodes import *
from ._store import *
from ._table import EntityRef as EntityRef
from ._table import Router as Router
from ._table import Table as Table

_export(__name__)
