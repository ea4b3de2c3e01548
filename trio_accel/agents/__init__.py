"""Agents: the parts between a model and an answer, above devices, patterns and the cluster's store."""

from .._names import export as _export

_export(__name__)
