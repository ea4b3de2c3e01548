"""The application's side of a worker: requests, their outcomes, memory that outlives it."""
