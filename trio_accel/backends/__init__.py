"""Kinds of devices: what they have in common, and one folder for each."""

from ._registry import list_devices, resolve

__all__ = ["list_devices", "resolve"]
