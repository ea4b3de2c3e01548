"""Common parts of the libraries: their base class, workspaces, and kernels of the user's own."""
