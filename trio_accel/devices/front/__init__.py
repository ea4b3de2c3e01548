"""What programs hold: devices, and the system that opens them."""
