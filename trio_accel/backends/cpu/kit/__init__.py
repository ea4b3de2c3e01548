"""What the libraries share: their class, and a launch as a kernel sees it."""
