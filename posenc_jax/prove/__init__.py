"""Checks of the attention kernels on the device that runs them: what compilers cannot see."""
