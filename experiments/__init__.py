"""Experiments with tiny models that differ only in the position encoding.

`python -m experiments --help` lists the commands.
"""
