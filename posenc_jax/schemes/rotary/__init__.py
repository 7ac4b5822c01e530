"""Schemes that rotate queries and keys, and the maps of their frequencies."""
