"""Attention kernels for NVIDIA GPUs of compute capability 9.0, in Pallas."""
