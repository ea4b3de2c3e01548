"""The common part of GPU backends names no vendor. `driver` says what a vendor's part has to have."""
