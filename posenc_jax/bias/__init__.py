"""Schemes that add a function of two positions to the logits."""
