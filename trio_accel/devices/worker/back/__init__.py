"""The worker's side: it serves requests with the engine."""
