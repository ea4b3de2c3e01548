"""Arrays in device memory: blocks, references, and the outputs of operations that are not done."""
