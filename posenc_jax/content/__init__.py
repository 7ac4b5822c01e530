"""Schemes that add a function of content and positions to the logits."""
