"""Common parts of the libraries: their class, and a launch as a kernel sees it."""
