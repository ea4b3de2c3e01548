"""What a backend implements: protocols, specifications of operations, dtypes, values and errors."""
