"""The contract of a backend: protocols, specifications of operations, dtypes, values and errors."""
