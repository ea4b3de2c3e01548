"""Expressions compiled by the C++ compiler of the machine (D186)."""
