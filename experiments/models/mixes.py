"""Mixes of schemes that a name cannot express: layers with windows, chains with settings.

    --schemes experiments.models.mixes:rope_nope

The model repeats a pattern of layers up to its number of layers. Windows are a quarter of the
trained length of 128 that `configs/study_catalogue.toml` has.
"""

import posenc_jax as pe

WINDOW = 32


def rope_query_slope(num_heads: int, head_dim: int) -> pe.Scheme:
    """Returns RoPE with a penalty on distance whose slope depends on the query (GRAPE-A)."""
    return pe.chain(
        pe.RoPE(head_dim=head_dim), pe.GRAPEA(num_heads=num_heads, head_dim=head_dim, gate="query")
    )


def dynamic_ntk(head_dim: int, trained_length: int) -> pe.Scheme:
    """Returns RoPE whose frequencies follow the length beyond the trained one."""
    scaling = pe.DynamicNTK(original_max_position=trained_length, length=None)
    return pe.RoPEByLength(head_dim=head_dim, scaling=scaling)


def rope_nope(head_dim: int) -> tuple[pe.LayerSpec, ...]:
    """Returns layers with RoPE and without positions in turn, as SmolLM3 has them."""
    return pe.LayerSpec(pe.RoPE(head_dim=head_dim)), pe.LayerSpec(pe.NoPE())


def local_rope_nope(head_dim: int) -> tuple[pe.LayerSpec, ...]:
    """Returns layers with RoPE in a window and whole ones without positions, as in Cohere 2."""
    return pe.LayerSpec(pe.RoPE(head_dim=head_dim), window=WINDOW), pe.LayerSpec(pe.NoPE())


def local_rope_slow_rope(head_dim: int) -> tuple[pe.LayerSpec, ...]:
    """Returns layers with RoPE in a window and whole ones with a slower RoPE, as in Gemma 3."""
    return (
        pe.LayerSpec(pe.RoPE(head_dim=head_dim), window=WINDOW),
        pe.LayerSpec(pe.RoPE(head_dim=head_dim, theta=1e6)),
    )


def local_rope(head_dim: int) -> tuple[pe.LayerSpec, ...]:
    """Returns layers with RoPE in a window."""
    return (pe.LayerSpec(pe.RoPE(head_dim=head_dim), window=WINDOW),)


def rope_100(head_dim: int) -> pe.Scheme:
    """Returns RoPE with the base 100: most pairs finish a turn within 128 tokens."""
    return pe.RoPE(head_dim=head_dim, theta=100.0)


def rope_500(head_dim: int) -> pe.Scheme:
    """Returns RoPE with the base 500."""
    return pe.RoPE(head_dim=head_dim, theta=500.0)


def t5_unscaled(num_heads: int, trained_length: int) -> tuple[pe.LayerSpec, ...]:
    """Returns layers with T5's bias and its own factor on q . k, which is one."""
    return (pe.LayerSpec(pe.T5(num_heads=num_heads, max_distance=trained_length), scale=1.0),)
