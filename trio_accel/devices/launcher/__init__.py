"""The launcher process, which starts workers and cleans up all of them."""
