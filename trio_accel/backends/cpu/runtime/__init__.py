"""Base of the libraries: streams, memory, and facts about the processor."""
