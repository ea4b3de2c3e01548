"""Derivatives of expressions: programs of steps, and their texts (D207)."""
