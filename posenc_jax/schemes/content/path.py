r"""PaTH: a product of Householder-like reflections between key and query, one per token.

    logits[i, j] = q_i^T H_i H_{i-1} ... H_{j+1} k_j / sqrt(H),    H_t = I - beta_t w_t w_t^T

w_t is a unit vector and beta_t = 2 sigmoid(.) a scalar, both computed from token t, so that the
product along the path from j to i can rotate, reflect or attenuate k_j depending on the tokens
in between. w is a projection of x (of rank 32 if each query head has one, as published),
a causal convolution over 3 tokens of a segment and SiLU. Keys at later coordinates are masked,
whether or not attention is causal. A `mask` hides logits: tokens that it hides from some queries
of a call reflect for all, and tokens that it hides from all queries for none. So a decode step with
a mask that hides tokens from its queries alone differs from the whole sequence.

With L the strictly lower part of diag(beta) W W^T, the reflections of a chunk of 64 tokens are

    H_C ... H_1 = I - W^T T diag(beta) W,    T = (I + L)^-1

and for a path that ends within the chunk, the rows of W after its end are zero. T is computed once
for all queries, and a scan over the chunks, last to first, applies them to each query. Keys are
cached untransformed, together with w and beta, and each decode step computes T again; the authors
rewrite all cached keys at every step.

`forget_gate` is PaTH-FoX: the gates of FoX, whose sums are multiplied by the logit scale as in
the authors' kernels; FoX itself adds them after the scale.

Paper: Yang et al. PaTH Attention: Position Encoding via Accumulating Householder
Transformations. 2025. https://arxiv.org/abs/2505.16381
Reference code: fla-org/flash-linear-attention, fla/layers/path_attn.py, and
naive_path_attn in tests/ops/test_path_attn.py.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import activations, integers, positive_fields, query_heads, require
from posenc_jax.engine.api import AttentionCall
from posenc_jax.engine.rule import Rule
from posenc_jax.engine.rules import LogitsTransform
from posenc_jax.ops.init import torch_uniform
from posenc_jax.ops.short_conv import short_convolution
from posenc_jax.schemes.content.fox import FoX
from posenc_jax.schemes.scheme import Scheme, Traits

CHUNK = 64


def attend_along_path(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    w: jax.Array,
    beta: jax.Array,
    scale: float,
    attention: AttentionCall,
    *rules: Rule,
) -> jax.Array:
    """Returns attention [B, T, N, V] with a reflection I - beta w w^T at every token.

    w are unit vectors [B, S, K or N, H], and beta is [B, S, K or N]. `rules` are added.
    """
    rule = LogitsTransform(
        _ApplyReflections(scale),
        q_features=q.astype(jnp.float32),
        k_features=(k, w, beta),
        expand=_chunk_products,
        reads_seen_only=True,
    )
    return attention(q, k, v, (rule, *rules))


def _chunk_products(shared, heads, k_features):
    """Returns K, W, T tril(diag(beta) W K^T, -1) and T diag(beta) W, [chunks, N, C, ...]."""
    k, w, beta = (x.astype(jnp.float32) for x in k_features)
    size = min(CHUNK, 1 << (k.shape[0] - 1).bit_length())

    def chunked(x):
        x = jnp.pad(x, ((0, -x.shape[0] % size), *((0, 0),) * (x.ndim - 1)))
        return jnp.swapaxes(x.reshape(-1, size, *x.shape[1:]), 1, 2)

    k, w = chunked(k), chunked(w)
    beta_w = chunked(beta)[..., None] * w
    beta_w_w, beta_w_k = (
        jnp.tril(jnp.einsum("znth,znsh->znts", beta_w, x, precision="highest"), -1) for x in (w, k)
    )
    inverse = _inverse_of_unit_lower(beta_w_w)
    products = (jnp.matmul(inverse, x, precision="highest") for x in (beta_w_k, beta_w))
    return k, w, *products


def _inverse_of_unit_lower(low):
    """Returns (I + low)^-1 for strictly lower triangular [..., C, C], C a power of two.

    Each step doubles the width of the inverted diagonal blocks. It uses matrix products only,
    which XLA compiles and shards on every platform, unlike LAPACK's triangular solve.
    """
    lead, size = low.shape[:-2], low.shape[-1]
    inverse = jnp.ones((*lead, size, 1, 1), low.dtype)
    width = 1
    while width < size:
        count = size // (2 * width)
        blocks = low.reshape(*lead, count, 2 * width, count, 2 * width)
        corner = jnp.einsum("...aiaj->...aij", blocks)[..., width:, :width]
        pairs = inverse.reshape(*lead, count, 2, width, width)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        corner = jnp.matmul(corner, first, precision="highest")
        corner = -jnp.matmul(second, corner, precision="highest")
        right = ((0, 0),) * (first.ndim - 1)
        first = jnp.pad(first, (*right, (0, width)))
        inverse = jnp.concatenate([first, jnp.concatenate([corner, second], -1)], -2)
        width *= 2
    return inverse[..., 0, :, :]


@dataclasses.dataclass(frozen=True)
class _ApplyReflections:
    """Adds to one query's logits, [N, S], the difference that the reflections make.

    `q_feature` is q_i, [N, H]; `chunks` is the result of `_chunk_products`.
    """

    scale: float

    def __call__(self, shared, heads, q_feature, chunks, logits, seen, q, k):
        if not logits.shape[1]:
            return logits
        count, _, size, _ = chunks[0].shape
        slots = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
        visible = seen & (k <= q)[None]
        last = jnp.max(jnp.where(visible, slots, -1), axis=1, keepdims=True)
        on_path = jnp.pad(slots <= last, ((0, 0), (0, count * size - logits.shape[1])))
        on_path = jnp.swapaxes(on_path.reshape(-1, count, size), 0, 1)

        def step(delta, chunk):
            """`delta` is the reflected query minus q_i."""
            k, w, logit_products, query_products, on_path = chunk
            dots = jnp.einsum("nh,nth->nt", q_feature + delta, w, precision="highest")
            dots = jnp.where(on_path, dots, 0.0)
            added = jnp.einsum("nh,nsh->ns", delta, k, precision="highest")
            added -= jnp.einsum("nt,nts->ns", dots, logit_products, precision="highest")
            delta -= jnp.einsum("nt,nth->nh", dots, query_products, precision="highest")
            return delta, added

        # Zeros that vary over the mesh axes that q_feature varies over.
        zeros = 0.0 * q_feature
        _, added = jax.lax.scan(step, zeros, (*chunks, on_path), reverse=True)
        added = jnp.swapaxes(added, 0, 1).reshape(q_feature.shape[0], -1)[:, : logits.shape[1]]
        return jnp.where(visible, logits + self.scale * added, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class PaTH(Scheme):
    """PaTH attention (Yang et al. 2025).

    Attributes:
      num_heads: the number of query heads, N.
      head_dim: the head dim, H.
      model_dim: the model dim, D.
      num_kv_heads: K, for reflections of the key heads. Default: of the N query heads.
      rank: rank of the projection to w; None: a full matrix.
      short_conv: whether w is convolved over 3 tokens.
      forget_gate: whether to add FoX's forget gate per token and query head.

    Raises:
      ValueError: for sizes below one, or a `num_kv_heads` that does not divide `num_heads`.

    >>> scheme = PaTH(num_heads=4, head_dim=16, model_dim=64)
    >>> params = scheme.init(jax.random.key(0))
    >>> [matrix.shape for matrix in params["w"]], params["beta"].shape
    ([(64, 32), (32, 64)], (64, 4))
    """

    num_heads: int
    head_dim: int
    model_dim: int
    num_kv_heads: int | None = None
    rank: int | None = 32
    short_conv: bool = True
    forget_gate: bool = False
    name: ClassVar[str] = "path"
    traits: ClassVar = Traits(
        relative=True,
        order_only=True,
        reads_x=True,
        causal_only="keys after the query have no weight",
    )

    def __post_init__(self):
        positive_fields(self, "num_heads", "head_dim", "model_dim")
        if self.rank is not None:
            positive_fields(self, "rank")
        integers("path", num_kv_heads=self._kv_heads)
        require(
            self._kv_heads >= 1 and self.num_heads % self._kv_heads == 0,
            f"path: num_kv_heads must divide num_heads = {self.num_heads}, "
            f"got {self.num_kv_heads}.",
        )

    @property
    def param_axes(self):
        heads = "num_kv_heads" if self.num_kv_heads else "num_heads"
        axes = {"w": ("model_dim rank",), "beta": f"model_dim {heads}", "beta_bias": heads}
        return axes | {"gate": self._fox.param_axes}

    def init(self, key):
        """Returns {"w": matrices [in, out], "beta": [D, heads], "beta_bias": [heads], ...}.

        "conv" [3, heads * H] with `short_conv`, and FoX's parameters "gate" with `forget_gate`.
        All are initialised as torch.nn.Linear and Conv1d, but for "gate".
        """
        heads = self._kv_heads
        dim, width = self.model_dim, heads * self.head_dim
        keys = jax.random.split(key, 5)
        if self.rank is not None:
            down = torch_uniform(keys[0], (dim, self.rank), dim)
            w = down, torch_uniform(keys[1], (self.rank, width), self.rank)
        else:
            w = (torch_uniform(keys[0], (dim, width), dim),)
        params = {"w": w, "beta": torch_uniform(keys[2], (dim, heads), dim)}
        params["beta_bias"] = torch_uniform(keys[3], (heads,), dim)
        if self.short_conv:
            params["conv"] = torch_uniform(keys[4], (3, width), 3)
        if self.forget_gate:
            params["gate"] = self._fox.init(jax.random.fold_in(key, 5))
        return params

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns FoX's sums, (w, beta, FoX's sums) and the states of convolution and FoX."""
        x = activations("path", x, self.model_dim, "w and beta")
        query_heads("path", q, self.num_heads, self.head_dim)
        conv_state, fox_state = (None, None) if state is None else state
        q_sums = k_sums = None
        if self.forget_gate:
            q_sums, k_sums, fox_state = self._fox.features(
                params["gate"], x, q, k, coordinates, segment_ids, fox_state
            )
        w = x
        for matrix in params["w"]:
            w = jnp.dot(w, matrix, precision="highest")
        if self.short_conv:
            if segment_ids is None:
                segment_ids = jnp.zeros_like(x[:, :, 0], jnp.int32)  # Sharded as x is.
            w, conv_state = short_convolution(w, params["conv"], segment_ids, conv_state)
            w = jax.nn.silu(w)
        w = w.reshape(*w.shape[:2], w.shape[2] // self.head_dim, self.head_dim)
        w *= jax.lax.rsqrt(jnp.sum(w * w, -1, keepdims=True) + 1e-6)
        beta = jnp.dot(x, params["beta"], precision="highest") + params["beta_bias"][None, None]
        return q_sums, (w, 2.0 * jax.nn.sigmoid(beta), k_sums), (conv_state, fox_state)

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        if attention.softcap is not None:
            raise NotImplementedError(
                "path: softcap is applied before the reflections change the logits, got softcap="
                f"{attention.softcap}."
            )
        if attention.mask is not None and q.shape[1] != k.shape[1]:
            raise NotImplementedError(
                "path: a mask in a call with a cache: keys that it hides from this call's queries "
                "alone are on the path of others; give padding as segment_ids."
            )
        scale = self.head_dim**-0.5 if attention.scale is None else attention.scale
        w, beta, k_sums = k_features
        rules = ()
        if self.forget_gate:
            rules = (dataclasses.replace(self._fox.rules({}, q_features, k_sums), scaled=True),)
        return attend_along_path(q, k, v, w, beta, scale, attention, *rules)

    @property
    def _kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def _fox(self) -> FoX:
        return FoX(self.num_heads, self.model_dim)
