"""One decoder for many families, from GPT-2 to Gemma 3 and gpt-oss.

Attention follows from `pe.from_hf`, one `LayerSpec` per layer; `families.py` has the other
differences between them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

import posenc_jax as pe
from posenc_jax.nnx import Attention, PositionEncoding

ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}


def check_tokens(
    caller: str, name: str, tokens: Any, vocabulary: int, is_padding: Any = False
) -> None:
    """Raises `ValueError` for tokens outside [0, vocabulary), where they are known.

    Args:
      caller, name: of the argument, for messages.
      tokens: integers.
      vocabulary: V.
      is_padding: bool, true for tokens that may be any number.
    """
    if isinstance(tokens, Tracer) or isinstance(is_padding, Tracer):
        return
    known = np.asarray(tokens)
    outside = known[((known < 0) | (known >= vocabulary)) & np.logical_not(is_padding)]
    if outside.size:
        raise ValueError(
            f"{caller}: {name} must be in [0, {vocabulary}), the vocabulary, got {outside[0]}."
        )


def embed_tokens(
    caller: str,
    embedding: nnx.Embed,
    tokens: jax.Array,
    segment_ids: jax.Array | None = None,
    name: str = "tokens",
) -> jax.Array:
    """Returns token embeddings [B, T, D].

    Args:
      caller, name: of the argument, for messages.
      embedding: of the vocabulary.
      tokens: integers [B, T]; under `jit`, those outside the vocabulary have embeddings of NaN.
      segment_ids: integers [B, T], below zero for padding, which may be any number.

    Raises:
      ValueError: for known tokens outside the vocabulary, and segment ids of another shape.
    """
    is_padding, size = False, embedding.num_embeddings
    if segment_ids is not None:
        if segment_ids.shape != tokens.shape:
            got = segment_ids.shape
            raise ValueError(f"{caller}: segment_ids must be [B, T] = {tokens.shape}, got {got}.")
        known = segment_ids if isinstance(segment_ids, Tracer) else np.asarray(segment_ids)
        is_padding = known < 0
    check_tokens(caller, name, tokens, size, is_padding)
    # NaN of padding would reach the gradients of parameters.
    tokens = jnp.where(is_padding, jnp.zeros_like(tokens), tokens)
    x = embedding(tokens)  # It counts numbers below zero from the end.
    return jnp.where(((tokens < 0) | (tokens >= size))[..., None], jnp.nan, x)


def choose_tokens(logits: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Returns the likeliest tokens [B] for logits [B, V], or samples; -1 where a logit is NaN.

    With -1 as the next token, all later logits of a row are NaN, too.
    """
    tokens = jnp.argmax(logits, -1) if key is None else jax.random.categorical(key, logits)
    return jnp.where(jnp.isnan(logits).any(-1), -1, tokens)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Settings of a transformer.

    Attributes:
      layers: the attention of each layer.
      vocabulary, model_dim, num_heads, num_kv_heads, head_dim, mlp_dim: sizes.
      norm: "rms" or "layer".
      epsilon: of the norms.
      activation: a name in `ACTIVATIONS`.
      gated: whether the MLP multiplies by a second projection of its input.
      attention_bias, mlp_bias: whether projections have biases.
      parallel: whether attention and MLP of a layer read the same activations.
      post_norms: whether there are norms after attention and after the MLP.
      embedding_norm: whether there is a norm after the embedding.
      embedding_scale: the factor on token embeddings.
      tied: whether the embedding is the output projection, too.
      logit_softcap: of the output.
      is_causal: whether tokens see only those before them.
      experts: the number of experts and how many a token uses. Default: an MLP.
      dtype, param_dtype: of activations and of parameters, as in `nnx.Linear`.
      dot_general: of all projections, as in `nnx.Linear`; see `half_precision.py`.
    """

    layers: tuple[pe.LayerSpec, ...]
    vocabulary: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    norm: str = "rms"
    epsilon: float = 1e-6
    activation: str = "silu"
    gated: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    parallel: bool = False
    post_norms: bool = False
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    tied: bool = False
    logit_softcap: float | None = None
    is_causal: bool = True
    experts: tuple[int, int] | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    dot_general: Callable[..., jax.Array] = jax.lax.dot_general

    def __post_init__(self):
        if f"{self.activation}" not in ACTIVATIONS:
            raise ValueError(
                f"ModelConfig: activation must be one of {[*ACTIVATIONS]}, got {self.activation!r}."
            )

    @property
    def dtypes(self) -> dict[str, Any]:
        """Arguments of modules."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    def new_norm(self, rngs: nnx.Rngs) -> nnx.Module:
        """Returns a norm over D."""
        if self.norm == "rms":
            return nnx.RMSNorm(self.model_dim, epsilon=self.epsilon, **self.dtypes, rngs=rngs)
        return nnx.LayerNorm(
            self.model_dim,
            epsilon=self.epsilon,
            use_fast_variance=False,
            **self.dtypes,
            rngs=rngs,
        )

    def new_attention(self, layer: pe.LayerSpec, rngs: nnx.Rngs) -> Any:
        """Returns the attention of a layer."""
        return Attention(
            self.model_dim,
            self.num_heads,
            position=layer,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            use_bias=self.attention_bias,
            is_causal=self.is_causal,
            dot_general=self.dot_general,
            **self.dtypes,
            rngs=rngs,
        )

    def new_mlp(self, index: int, rngs: nnx.Rngs) -> nnx.Module:
        """Returns the MLP of layer `index`, or its experts."""
        mixed = self.experts
        return MLP(self, rngs) if mixed is None else MixtureOfExperts(self, mixed, rngs)


class MLP(nnx.Module):
    """Two projections, or three with a gate."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        linear = functools.partial(
            nnx.Linear,
            use_bias=config.mlp_bias,
            dot_general=config.dot_general,
            **config.dtypes,
            rngs=rngs,
        )
        wide, narrow = config.mlp_dim, config.model_dim
        self.up = linear(narrow, wide)
        self.gate = linear(narrow, wide) if config.gated else None
        self.down = linear(wide, narrow)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x):
        """Returns [B, T, D]."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Experts(nnx.Module):
    """The experts of gpt-oss, all of them computed for every token."""

    def __init__(self, count: int, config: ModelConfig, rngs: nnx.Rngs):
        narrow, wide, init = config.model_dim, config.mlp_dim, nnx.initializers.lecun_normal()
        kind = config.param_dtype
        self.gate_up_proj = nnx.Param(init(rngs.params(), (count, narrow, 2 * wide), kind))
        self.gate_up_proj_bias = nnx.Param(jnp.zeros((count, 2 * wide), kind))
        self.down_proj = nnx.Param(init(rngs.params(), (count, wide, narrow), kind))
        self.down_proj_bias = nnx.Param(jnp.zeros((count, narrow), kind))

    def __call__(self, x):
        """Returns [B, T, E, D] for x [B, T, D]."""
        y = jnp.einsum("btd,edf->btef", x, self.gate_up_proj[...])
        y += self.gate_up_proj_bias[None, None]
        gate, up = jnp.minimum(y[..., ::2], 7.0), jnp.clip(y[..., 1::2], -7.0, 7.0)
        y = (up + 1.0) * gate * jax.nn.sigmoid(1.702 * gate)
        y = jnp.einsum("btef,efd->bted", y, self.down_proj[...])
        return y + self.down_proj_bias[None, None]


class MixtureOfExperts(nnx.Module):
    """The experts that a router chooses for each token."""

    def __init__(self, config: ModelConfig, experts: tuple[int, int], rngs: nnx.Rngs):
        count, self.per_token = experts
        self.router = nnx.Linear(config.model_dim, count, **config.dtypes, rngs=rngs)
        self.experts = Experts(count, config, rngs)

    def __call__(self, x):
        """Returns [B, T, D]."""
        logits, chosen = jax.lax.top_k(self.router(x), self.per_token)
        y = jnp.take_along_axis(self.experts(x), chosen[..., None], 2)
        return jnp.einsum("btkd,btk->btd", y, jax.nn.softmax(logits))


class Block(nnx.Module):
    """Attention and MLP with their norms."""

    def __init__(self, config: ModelConfig, index: int, layer: pe.LayerSpec, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = config.new_norm(rngs), config.new_norm(rngs)
        self.post_attention_norm = config.new_norm(rngs) if config.post_norms else None
        self.post_mlp_norm = config.new_norm(rngs) if config.post_norms else None
        self.attention = config.new_attention(layer, rngs)
        self.mlp = config.new_mlp(index, rngs)
        self.parallel = config.parallel

    def __call__(self, x, cache=None, **tokens):
        """Returns [B, T, D] and the new cache, or None."""
        normed, new = self.attention_norm(x), None
        if cache is None:
            y = self.attention(normed, **tokens)
        else:
            y, new = self.attention(normed, cache=cache, **tokens)
        if self.post_attention_norm is not None:
            y = self.post_attention_norm(y)
        z = self.mlp(self.mlp_norm(x if self.parallel else x + y))
        if self.post_mlp_norm is not None:
            z = self.post_mlp_norm(z)
        return x + y + z, new


class Decoder(nnx.Module):
    """A language model."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        sizes = config.vocabulary, config.model_dim
        self.embedding = nnx.Embed(*sizes, **config.dtypes, rngs=rngs)
        self.embedding_norm = config.new_norm(rngs) if config.embedding_norm else None
        first = config.layers[0].scheme
        at_input = pe.Acts.EMBEDDING in first.acts
        self.position = PositionEncoding(first, rngs=rngs) if at_input else None
        layers = config.layers
        if not first.acts_in_attention:
            layers = [dataclasses.replace(layer, scheme=pe.NoPE()) for layer in layers]
        self.blocks = nnx.List(Block(config, i, layer, rngs) for i, layer in enumerate(layers))
        self.norm = config.new_norm(rngs)
        options = {"dot_general": config.dot_general, "preferred_element_type": jnp.float32}
        linear = functools.partial(nnx.Linear, use_bias=False, **config.dtypes, rngs=rngs)
        self.output = None if config.tied else linear(*sizes[::-1], **options)

    def new_caches(
        self, batch: int, capacity: int, tokens_per_call: int | None = None, **options: Any
    ) -> list[pe.KVCache]:
        """Returns an empty cache for each layer.

        Args:
          batch, capacity: B and the number of slots for the tokens of a row.
          tokens_per_call: the most tokens of a call; caches of layers with a window are then
            rings, and take no more slots than they need. Default: any number.
          **options: as in `Attention.new_cache`.
        """
        options |= {"tokens_per_call": tokens_per_call}
        return [block.attention.new_cache(batch, capacity, **options) for block in self.blocks]

    def embed(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Returns token embeddings [B, T, D], before positions and norms; see `embed_tokens`."""
        x = embed_tokens("Decoder", self.embedding, tokens, segment_ids)
        return x * self.config.embedding_scale

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns logits, float32 [B, T, V], for the result of a call with `hidden=True`."""
        if self.output is not None:
            logits = self.output(hidden)
        else:  # `embedding.attend` takes six times as long for one token on CPUs.
            axes = (((2,), (1,)), ((), ()))
            w = self.embedding.embedding[...].astype(hidden.dtype)
            logits = self.config.dot_general(hidden, w, axes, preferred_element_type=jnp.float32)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def __call__(
        self,
        tokens: jax.Array,
        caches: list[pe.KVCache] | None = None,
        *,
        inputs: jax.Array | None = None,
        positions: jax.Array | None = None,
        last: int | None = None,
        hidden: bool = False,
        **options: Any,
    ) -> Any:
        """Returns logits [B, T, V], and with caches also the new caches.

        Args:
          tokens: integers [B, T]; see `embed_tokens` for those outside the vocabulary.
          caches: caches of earlier tokens; see `new_caches`.
          inputs: [B, T, D] instead of `embed(tokens)`, as with images in the text.
          positions: integers [B, T]. Default: 0, 1, ... after the tokens in the caches.
          last: the number of last tokens of each row that are returned. Default: T.
          hidden: whether to return hidden states [B, T, D] after the last norm; `logits` takes
            them, a part at a time where T logits would be too large.
          **options: `segment_ids` and `coordinates`, as in `posenc_jax.scheme_attention`.
        """
        x = self.embed(tokens, options.get("segment_ids")) if inputs is None else inputs
        if self.position is not None:
            cache = None if caches is None else caches[0]
            x = self.position(x, positions, cache=cache, **options)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        new = []
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x, cache = block(x, cache, positions=positions, **options)
            new.append(cache)
        if last is not None:
            if not 1 <= last <= x.shape[1]:
                raise ValueError(f"Decoder: last must be from 1 to T = {x.shape[1]}, got {last}.")
            x = x[:, x.shape[1] - last :]
        x = self.norm(x)
        x = x if hidden else self.logits(x)
        return x if caches is None else (x, new)


def jit_step(model: Decoder) -> Callable:
    """Returns a compiled step: `logits, caches = step(tokens, caches)`.

    Logits [B, V] are of the last token of each row. The caches are donated.
    `nnx.jit` would split and merge the model in every call, which takes longer than a step of a
    model of 135 million parameters; a list of its arrays is passed faster than its state.
    """
    graph, state = nnx.split(model)
    arrays, structure = jax.tree.flatten(state)

    @functools.partial(jax.jit, donate_argnums=2)
    def step(arrays, tokens, caches):
        model = nnx.merge(graph, jax.tree.unflatten(structure, arrays))
        logits, caches = model(tokens, caches, last=1)
        return logits[:, -1], caches

    return functools.partial(step, arrays)


def _holds(x: Any, condition: Callable) -> bool:
    """Returns whether a condition holds for all elements, true for values that are traced."""
    return isinstance(x, Tracer) or bool(np.all(condition(np.asarray(x))))


def generate(
    model: Decoder,
    tokens: jax.Array,
    steps: int,
    *,
    mask: jax.Array | None = None,
    key: jax.Array | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    delta: jax.Array | None = None,
    with_logits: bool = False,
    **options: Any,
) -> Any:
    """Continues a padded batch: one prefill, and a scan over steps.

    Args:
      model: a `Decoder`.
      tokens: prompts [B, T], padded on the left.
      steps: number of new tokens, at least 1.
      mask: bool [B, T], true for tokens. Default: no padding.
      key: for samples. Default: the token of the greatest logit.
      temperature, top_k: of samples: the divisor of logits, and how many tokens are drawn from.
        Default: 1, and all tokens.
      delta: coordinates minus positions of new tokens, [B]. Default: zero.
      with_logits: whether to return logits, too.
      **options: `inputs` and `coordinates` of the prompts, as calls of a `Decoder` take them.

    Returns:
      The new tokens [B, steps]; -1 from where the logits of a row are NaN, as they are under `jit`
      for tokens outside the vocabulary, padding on the right and a temperature of 0 or less; there
      `top_k` and `with_logits` are static arguments. With logits also the prompt's logits and the
      ones that chose the tokens, [B, T + steps - 1, V].

    Raises:
      ValueError: for no steps, settings of samples without a key, a temperature of 0 or less,
        top_k below 1, padding on the right, tokens outside the vocabulary, and more tokens than
        a table of positions holds.
    """
    if steps < 1:
        raise ValueError(f"generate: steps must be at least 1, got {steps}.")
    if key is None and (temperature is not None or top_k is not None):
        raise ValueError("generate: temperature and top_k are settings of samples, which need key.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"generate: top_k must be at least 1, got {top_k}.")
    if temperature is not None and not _holds(temperature, lambda x: x > 0):
        raise ValueError(f"generate: temperature must be positive, got {temperature}.")
    if mask is not None and not _holds(mask, lambda x: x[:, -1]):
        raise ValueError("generate: mask must be padded on the left, and ends in false in a row.")
    batch, length = tokens.shape
    most = getattr(model.config.layers[0].scheme, "max_length", None)
    if most is not None and not isinstance(mask, Tracer):
        longest = length if mask is None else int(np.max(np.sum(np.asarray(mask), 1)))
        if longest + steps - 1 > most:
            raise ValueError(
                f"generate: {longest} tokens and {steps} new ones are more than the model's "
                f"max_length of {most} holds."
            )
    if mask is not None:
        positions, segment_ids = pe.positions.from_padding_mask(mask)
        options |= {"positions": positions, "segment_ids": segment_ids}
    caches = model.new_caches(batch, length + steps - 1, tokens_per_call=length)
    first, caches = model(tokens, caches, last=None if with_logits else 1, **options)
    if mask is not None:  # Under `jit` padding on the right cannot raise.
        first = first.at[:, -1].set(jnp.where(mask[:, -1:], first[:, -1], jnp.nan))

    def choose(logits, step):
        if key is None:
            return choose_tokens(logits)
        if temperature is not None:
            logits = jnp.where(temperature > 0, logits / temperature, jnp.nan)
        if top_k is not None:
            least = jax.lax.top_k(logits, top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return choose_tokens(logits, jax.random.fold_in(key, step))

    def advance(carry, step):
        token, caches = carry
        moved = None if delta is None else (caches[0].next_positions + delta)[:, None]
        logits, caches = model(token[:, None], caches, coordinates=moved)
        return (choose(logits[:, 0], step), caches), (token, logits if with_logits else None)

    start = choose(first[:, -1], 0), caches
    (last, _), (new, logits) = jax.lax.scan(advance, start, jnp.arange(1, steps))
    new = jnp.concatenate([new, last[None]]).T
    if not with_logits:
        return new
    return new, jnp.concatenate([first, jnp.moveaxis(logits[:, :, 0], 0, 1)], 1)
