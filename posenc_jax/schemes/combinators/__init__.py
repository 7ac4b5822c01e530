"""Schemes made of other schemes."""
