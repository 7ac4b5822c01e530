"""Schemes of claims that take more than a name: `experiments.scoreboard.schemes:rope_pi`."""

import posenc_jax as pe


def rope_pi(head_dim: int, *, factor: float) -> pe.Scheme:
    """Returns RoPE with interpolated positions (https://arxiv.org/abs/2306.15595)."""
    return pe.RoPE(head_dim, scaling=pe.PI(factor))


def abacus(max_length: int, model_dim: int) -> pe.Scheme:
    """Returns a table for the places of digits, axis 1 of the coordinates, and nothing else."""
    return pe.on_axis(pe.LearnedAbsolute(max_length, model_dim), 1)


def offset_keys(head_dim: int) -> pe.Scheme:
    """Returns RoPE on the first half of the dimensions, and keys shifted by one in the second."""
    return pe.chain(pe.RoPE(head_dim, rotary_dim=head_dim // 2), pe.PartialKeyOffset(head_dim))
