"""Schemes of claims that take more than a name: `experiments.scoreboard.schemes:offset_keys`."""

import posenc_jax as pe


def offset_keys(head_dim: int) -> pe.Scheme:
    """Returns RoPE on the first half of the dimensions, and keys shifted by one in the second."""
    return pe.chain(pe.RoPE(head_dim, rotary_dim=head_dim // 2), pe.PartialKeyOffset(head_dim))
