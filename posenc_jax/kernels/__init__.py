"""Attention kernels for TPUs and GPUs: what `implementation="pallas"` imports when it runs."""
