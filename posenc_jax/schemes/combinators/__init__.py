"""Schemes that combine or wrap other schemes."""
