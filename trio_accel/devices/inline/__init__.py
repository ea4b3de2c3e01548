"""Contexts in the process of the program."""
