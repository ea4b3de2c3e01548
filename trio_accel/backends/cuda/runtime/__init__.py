"""Layer on the driver: the context, streams, memory, transfers, graphs and kernels."""
