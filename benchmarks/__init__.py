"""Benchmarks: ``python -m benchmarks`` prints one table of ratios against a peer in the same run."""
