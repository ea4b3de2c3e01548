"""What an operator sees of a running program: metrics, traces, logs."""

__all__: list[str] = []
