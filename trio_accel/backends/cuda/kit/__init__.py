"""What the libraries share: their base class, plan caches, workspaces, layouts and checks."""
