"""Experiments with tiny models that differ in nothing but the position encoding.

`python -m experiments --help` lists the commands.
"""
