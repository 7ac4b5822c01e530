"""Schemes that add a function of the positions of query and key to the logits."""
