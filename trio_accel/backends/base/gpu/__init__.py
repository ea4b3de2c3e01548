"""The common part of GPU backends names no vendor. `driver` lists the parts of a vendor's backend."""
