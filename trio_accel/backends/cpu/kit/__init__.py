"""What the libraries share: their class, checks, and large arrays in pieces."""
