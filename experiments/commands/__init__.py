"""Commands of `python -m experiments` without a room of their own."""
