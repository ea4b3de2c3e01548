"""Base of the runtime of devices: events, order, availability, the error table."""
