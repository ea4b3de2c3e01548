"""The base of the device runtime: events, order, availability, the error table."""
