"""What backends of GPUs share: no vendor is named here. `driver` says what a vendor's part has to have."""
