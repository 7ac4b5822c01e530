"""Attention with a scheme as pure functions."""
