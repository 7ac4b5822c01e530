"""Attention: one meaning (`api`), several implementations."""
