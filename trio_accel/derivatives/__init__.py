"""Derivatives of expressions: programs of steps, and their texts (D207). None is a public name."""

__all__: list[str] = []
