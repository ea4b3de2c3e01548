"""The application's end of its workers: requests, their outcomes, memory that outlives a worker."""
