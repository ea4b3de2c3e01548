"""What the libraries compute on: streams, memory, and what the machine tells of its processor."""
