"""What all parts of the runtime of devices use: events, order, availability, the error table."""
