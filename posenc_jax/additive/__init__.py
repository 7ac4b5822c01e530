"""Schemes that add to the token embedding, and the scheme that does nothing."""
