"""Whole models on posenc_jax that load state dicts of Hugging Face's transformers.

docs/models.md says how they are tested, that they may change, and how to copy them.
"""
