"""Mixes of schemes that a name cannot express: layers with windows, chains with settings.

    --schemes experiments.models.mixes:rope_nope

The model repeats a pattern of layers up to its number of layers. Windows are a quarter of the
trained length.
"""

import posenc_jax as pe


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


def local_rope_nope(head_dim: int, trained_length: int) -> tuple[pe.LayerSpec, ...]:
    """Returns layers with RoPE in a window and whole ones without positions, as in Cohere 2."""
    return *local_rope(head_dim, trained_length), pe.LayerSpec(pe.NoPE())


def local_rope_slow_rope(head_dim: int, trained_length: int) -> tuple[pe.LayerSpec, ...]:
    """Returns layers with RoPE in a window and whole ones with a slower RoPE, as in Gemma 3."""
    slow = pe.LayerSpec(pe.RoPE(head_dim=head_dim, theta=1e6))
    return *local_rope(head_dim, trained_length), slow


def local_rope(head_dim: int, trained_length: int) -> tuple[pe.LayerSpec, ...]:
    """Returns layers with RoPE in a window.

    >>> local_rope(8, 128)[0].window
    32
    """
    return (pe.LayerSpec(pe.RoPE(head_dim=head_dim), window=trained_length // 4),)


def rope_100(head_dim: int) -> pe.Scheme:
    """Returns RoPE with the base 100: most pairs finish a turn within 128 tokens."""
    return pe.RoPE(head_dim=head_dim, theta=100.0)


def rope_500(head_dim: int) -> pe.Scheme:
    """Returns RoPE with the base 500."""
    return pe.RoPE(head_dim=head_dim, theta=500.0)


def rope_100k(head_dim: int) -> pe.Scheme:
    """Returns RoPE with the base 1e5."""
    return pe.RoPE(head_dim=head_dim, theta=1e5)


def rope_1m(head_dim: int) -> pe.Scheme:
    """Returns RoPE with the base 1e6, as the whole layers of Gemma 3 have it."""
    return pe.RoPE(head_dim=head_dim, theta=1e6)


def t5_own_scale(num_heads: int, trained_length: int) -> tuple[pe.LayerSpec, ...]:
    """Returns layers with T5's bias and the scale of its checkpoints, in place of 1/sqrt(H)."""
    return (pe.LayerSpec(pe.T5(num_heads=num_heads, max_distance=trained_length), scale=1.0),)


def cable_own_scale(num_heads: int, model_dim: int) -> tuple[pe.LayerSpec, ...]:
    """Returns layers with CABLE and the scale of its released code."""
    return (pe.LayerSpec(pe.contrib.CABLE(num_heads, model_dim), scale=1.0),)


def tupe_own_scale(
    num_heads: int, head_dim: int, model_dim: int, max_length: int
) -> tuple[pe.LayerSpec, ...]:
    """Returns layers with TUPE and the scale of its paper."""
    scheme = pe.TUPE(num_heads, head_dim, model_dim, max_length)
    return (pe.LayerSpec(scheme, scale=(2 * head_dim) ** -0.5),)


def deberta_own_scale(
    num_heads: int, head_dim: int, model_dim: int, trained_length: int
) -> tuple[pe.LayerSpec, ...]:
    """Returns layers with DeBERTa, in buckets up to the trained length, and its own scale.

    >>> deberta_own_scale(2, 12, 24, 128)[0].scale == 36**-0.5
    True
    """
    span, farthest = trained_length // 2, trained_length
    scheme = pe.DeBERTa(num_heads, head_dim, model_dim, span=span, max_distance=farthest)
    return (pe.LayerSpec(scheme, scale=(3 * head_dim) ** -0.5),)


def inkling_own_scale(num_heads: int, head_dim: int, model_dim: int) -> tuple[pe.LayerSpec, ...]:
    """Returns layers with Inkling and the scale of its models."""
    return (pe.LayerSpec(pe.Inkling(num_heads, model_dim), scale=1.0 / head_dim),)
