"""The Flax modules, NNX and Linen, and what they share."""
