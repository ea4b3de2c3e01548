"""What the libraries share: their base class, workspaces, and kernels of the user's own."""
