"""Schemes that scale the logits of a query by its position or context length."""
