"""A page with pictures of every scheme: `python -m experiments gallery`."""
