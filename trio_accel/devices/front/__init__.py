"""Objects of programs: devices, and the system that opens them."""
