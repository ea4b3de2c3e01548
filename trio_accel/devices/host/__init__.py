"""Host memory that a device transfers from and to."""
