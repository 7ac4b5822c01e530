"""The Flax modules of NNX and Linen, and their common parts."""
