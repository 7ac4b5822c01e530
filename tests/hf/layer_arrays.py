"""An attention layer of transformers computed by a `LayerSpec`, from arrays of that layer."""

import functools

import jax
import jax.numpy as jnp

import posenc_jax as pe
from tests.oracle import attend


def computed(spec, arrays, positions, *, params=None, clip=None, **options):
    """The output of attention [B, T, N, H].

    Args:
      spec: the layer.
      arrays: q, k and v as projected, and as far as there are any: x, the input of the layer;
        sinks; and the parameters of norms, such as "q_norm.scale".
      positions: [B, T].
      params: the parameters of the scheme; None: it has none.
      clip: the bound of queries and keys after their norm; None: none.
      **options: of `scheme_attention`.
    """
    q, k, v = (jnp.asarray(arrays[n]) for n in "qkv")
    norms = None
    if spec.qk_norm is not None:
        norms = tuple(functools.partial(spec.qk_norm, norm_params(arrays, n)) for n in "qk")
        if not spec.qk_norm.after_rotation:
            q, k, norms = norms[0](q), norms[1](k), None
    if clip is not None:
        q, k = jnp.clip(q, -clip, clip), jnp.clip(k, -clip, clip)
    scheme = spec.scheme if spec.scheme.acts_in_attention else pe.NoPE()
    if params is None:
        params = scheme.init(jax.random.key(0))
    options |= {"scale": spec.scale, "softcap": spec.softcap, "window": spec.window}
    if spec.chunk_size is not None:
        # Chunks of transformers begin at the first token.
        options["segment_ids"] = (positions - positions[:, :1]) // spec.chunk_size
    if spec.sinks:
        options["sinks"] = jnp.asarray(arrays["sinks"])
    x = arrays.get("x")
    return attend(scheme, params, q, k, v, x=x, positions=positions, norms=norms, **options)


def norm_params(arrays, which):
    """The parameters of the norm of "q" or "k"."""
    prefix = f"{which}_norm."
    return {n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)}
