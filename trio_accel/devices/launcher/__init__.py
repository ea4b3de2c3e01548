"""The launcher process, which starts workers and leaves none behind."""
