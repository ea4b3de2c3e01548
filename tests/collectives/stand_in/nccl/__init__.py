"""Replaces nccl4py when the stand-in driver replaces CUDA's."""
