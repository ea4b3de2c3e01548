"""How a loop learns that work on a stream is done."""
