"""Attention kernels for TPU, in Pallas."""
