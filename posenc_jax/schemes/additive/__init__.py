"""Schemes that add to the token embedding, and NoPE."""
