"""Whole models on posenc_jax that load state dicts of Hugging Face's transformers."""
