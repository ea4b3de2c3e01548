"""The worker process: it serves requests with the engine."""
