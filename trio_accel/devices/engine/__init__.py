"""The engine of one context: library actors, streams, hazards, memory, completion."""
