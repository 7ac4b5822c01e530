"""Checks of the attention kernels on the device that runs them."""
