"""Kinds of devices: what they have in common, and one folder for each."""

from ._registry import describe, list_devices, resolve

__all__ = ["describe", "list_devices", "resolve"]
