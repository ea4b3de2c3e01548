"""Stands for nccl4py where the stand-in driver stands for CUDA's."""
