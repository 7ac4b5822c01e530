"""DeepSeek-V3: multi-head latent attention and experts in groups, on the decoder of `decoder.py`.

Keys and values of all heads are projections of one latent of `latent_dim` numbers per token, and
all heads share the rotated end of a key:

    c = norm(W_c x),   k_n = [U_n c, rope(W_r x)],   v_n = V_n c,   n = 1 .. N

Without a cache, keys and values are computed. With one, only c and rope(W_r x) are stored, and
attention reads them as one key of all heads, since q_n . U_n c = (U_n^T q_n) . c, and
sum_s a_s V_n c_s = V_n sum_s a_s c_s.

Papers: DeepSeek-AI. DeepSeek-V2. 2024. https://arxiv.org/abs/2405.04434
DeepSeek-AI. DeepSeek-V3 Technical Report. 2024. https://arxiv.org/abs/2412.19437
Reference code: deepseek-ai/DeepSeek-V3, inference/model.py; huggingface/transformers 5.23,
modeling_deepseek_v3.py.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import posenc_jax as pe
from examples import families
from examples.decoder import ACTIVATIONS, MLP, Decoder, ModelConfig
from examples.weights import Config, State, Weights, fill


@dataclasses.dataclass(frozen=True)
class LatentRoPE(pe.RoPE):
    """RoPE of latent attention from a cache: keys are values, too, so that v is not stored."""

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        """Returns [B, T, N, H], whose first numbers are the sum of latents."""
        return attention.replace(finite_values=False)(q, k, k)


@dataclasses.dataclass(frozen=True)
class DeepSeekConfig(ModelConfig):
    """A decoder with latent attention and experts.

    Attributes:
      rope_dim: the number of dimensions at the end of a head that rotate.
      value_dim: V, the head dim of values.
      latent_dim: the numbers per token that keys and values are projections of.
      query_dim: the same for queries; None: they are projected from the input.
      dense_layers: the number of first layers that have an MLP.
      num_experts, experts_per_token, expert_dim: of the other layers.
      shared_experts: the number of experts that all tokens use.
      groups: of experts, in all and for a token.
      normalized: whether the weights of a token's experts sum to one before `expert_scale`.
      expert_scale: the factor on the weights of experts.
    """

    rope_dim: int = 0
    value_dim: int = 0
    latent_dim: int = 0
    query_dim: int | None = None
    dense_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_dim: int = 0
    shared_experts: int = 0
    groups: tuple[int, int] = (1, 1)
    normalized: bool = True
    expert_scale: float = 1.0

    @property
    def nope_dim(self) -> int:
        """Numbers of a head that are not rotated."""
        return self.head_dim - self.rope_dim

    def new_attention(self, layer: pe.LayerSpec, rngs: nnx.Rngs) -> Any:
        """Returns latent attention."""
        return LatentAttention(self, layer, rngs)

    def new_mlp(self, index: int, rngs: nnx.Rngs) -> nnx.Module:
        """Returns the MLP of layer `index`, or its experts."""
        return MLP(self, rngs) if index < self.dense_layers else MixtureOfExperts(self, rngs)


class LatentAttention(nnx.Module):
    """Multi-head latent attention."""

    def __init__(self, config: DeepSeekConfig, layer: pe.LayerSpec, rngs: nnx.Rngs):
        heads, dim, rank = config.num_heads, config.model_dim, config.latent_dim
        self.config, self.scheme = config, layer.scheme
        sizes = {"head_dim": rank + config.rope_dim, "rotary_start": rank}
        settings: dict[str, Any] = {**vars(layer.scheme), **sizes}
        self.latent_scheme = LatentRoPE(**settings)
        self.scale = config.head_dim**-0.5 if layer.scale is None else layer.scale
        bias, narrow = config.attention_bias, config.query_dim
        direct = narrow is None
        self.query_down = None if direct else nnx.Linear(dim, narrow, use_bias=bias, rngs=rngs)
        self.query_norm = None if direct else nnx.RMSNorm(narrow, rngs=rngs)
        self.query = nnx.LinearGeneral(
            narrow or dim, (heads, config.head_dim), use_bias=False, rngs=rngs
        )
        self.latent_down = nnx.Linear(dim, rank + config.rope_dim, use_bias=bias, rngs=rngs)
        self.latent_norm = nnx.RMSNorm(rank, rngs=rngs)
        self.latent_up = nnx.LinearGeneral(
            rank, (heads, config.nope_dim + config.value_dim), use_bias=False, rngs=rngs
        )
        self.out = nnx.LinearGeneral(
            (heads, config.value_dim), dim, axis=(-2, -1), use_bias=bias, rngs=rngs
        )

    def new_cache(
        self, batch: int, capacity: int, tokens_per_call: int | None = None, **options: Any
    ) -> pe.KVCache:
        """Returns an empty cache of `latent_dim + rope_dim` numbers per token."""
        config = self.config  # Without a window, a cache of any `tokens_per_call` is a full one.
        return pe.new_cache(
            self.latent_scheme,
            batch,
            capacity,
            num_heads=config.num_heads,
            num_kv_heads=1,
            head_dim=config.latent_dim + config.rope_dim,
            value_dim=0,
            **options,
        )

    def __call__(self, x, *, cache=None, **tokens):
        """Returns [B, T, D], and with a cache also the new cache."""
        config, nope_dim = self.config, self.config.nope_dim
        tokens |= {"is_causal": True, "scale": self.scale}
        if self.query_down is None or self.query_norm is None:
            q = self.query(x)
        else:
            q = self.query(self.query_norm(self.query_down(x)))
        latent, end = jnp.split(self.latent_down(x), [config.latent_dim], -1)
        latent = self.latent_norm(latent)
        if cache is None:
            k, v = jnp.split(self.latent_up(latent), [nope_dim], -1)
            end = jnp.broadcast_to(end[:, :, None], (*q.shape[:3], config.rope_dim))
            k = jnp.concatenate([k, end], -1)
            return self.out(pe.scheme_attention(self.scheme, {}, q, k, v, **tokens)[0])
        up_k, up_v = jnp.split(self.latent_up.kernel[...], [nope_dim], -1)
        q, q_end = jnp.split(q, [nope_dim], -1)
        q = jnp.concatenate([jnp.einsum("btnh,rnh->btnr", q, up_k), q_end], -1)
        k = jnp.concatenate([latent, end], -1)[:, :, None]
        latents, cache = pe.scheme_attention(
            self.latent_scheme, {}, q, k, k[..., :0], cache=cache, **tokens
        )
        out = jnp.einsum("btnr,rnv->btnv", latents[..., : config.latent_dim], up_v)
        return self.out(out), cache


class Router(nnx.Module):
    """The choice of experts for each token, from a few groups of experts."""

    def __init__(self, config: DeepSeekConfig, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(init(rngs.params(), (config.model_dim, config.num_experts)))
        self.e_score_correction_bias = nnx.Param(jnp.zeros(config.num_experts))
        self.config = config

    def __call__(self, x):
        """Returns the weights of experts [B, T, E], zero for experts that are not chosen."""
        config, (groups, used) = self.config, self.config.groups
        scores = jax.nn.sigmoid(x @ self.kernel[...])
        choice = scores + self.e_score_correction_bias[None, None]
        in_groups = choice.reshape(*choice.shape[:2], groups, -1)
        of_groups = jax.lax.top_k(in_groups, 2)[0].sum(-1)
        is_used = jax.nn.one_hot(jax.lax.top_k(of_groups, used)[1], groups).sum(-2)
        choice = jnp.where(is_used[..., None] > 0, in_groups, -jnp.inf).reshape(choice.shape)
        chosen = jax.lax.top_k(choice, config.experts_per_token)[1]
        weights = scores * jax.nn.one_hot(chosen, config.num_experts).sum(-2)
        if config.normalized:
            weights /= weights.sum(-1, keepdims=True) + 1e-20
        return weights * config.expert_scale


class Experts(nnx.Module):
    """Experts, all of them computed for every token."""

    def __init__(self, config: DeepSeekConfig, rngs: nnx.Rngs):
        count, narrow, wide = config.num_experts, config.model_dim, config.expert_dim
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        self.gate_up_proj = nnx.Param(init(rngs.params(), (count, 2 * wide, narrow)))
        self.down_proj = nnx.Param(init(rngs.params(), (count, narrow, wide)))
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x, weights):
        """Returns [B, T, D], the experts' outputs times weights [B, T, E]."""
        y = jnp.einsum("btd,efd->btef", x, self.gate_up_proj[...])
        gate, up = jnp.split(y, 2, -1)
        y = self.activation(gate) * up
        return jnp.einsum("btef,edf,bte->btd", y, self.down_proj[...], weights)


class MixtureOfExperts(nnx.Module):
    """Experts that are chosen for each token, and experts that all tokens use."""

    def __init__(self, config: DeepSeekConfig, rngs: nnx.Rngs):
        self.router, self.experts = Router(config, rngs), Experts(config, rngs)
        shared = dataclasses.replace(config, mlp_dim=config.expert_dim * config.shared_experts)
        self.shared_experts = MLP(shared, rngs)

    def __call__(self, x):
        """Returns [B, T, D]."""
        return self.experts(x, self.router(x)) + self.shared_experts(x)


_NAMES = {
    **families.FAMILIES["llama"].names,
    "query_down": "q_a_proj",
    "query_norm": "q_a_layernorm",
    "query": "q_b_proj",
    "latent_down": "kv_a_proj_with_mqa",
    "latent_norm": "kv_a_layernorm",
    "latent_up": "kv_b_proj",
    "router": "gate",
}


class DeepSeekWeights(Weights):
    """A state dict of DeepSeek-V3 by paths of our modules."""

    def __call__(self, path):
        """The array for a parameter."""
        if path[-2] != "latent_up":
            return super().__call__(path)
        return pe.heads_from_linear(
            self.state.take(f"{self.name(*path[:-1])}.weight"), self.num_heads
        )


def load(config: Mapping[str, Any], state: Mapping[str, Any]) -> Decoder:
    """The model of a Hugging Face config, with the weights of a state dict.

    Args:
      config: the dict of a whole config of `deepseek_v3`.
      state: {name: array} of the parameters and of the `e_score_correction_bias` of experts.

    Raises:
      ValueError: for another type of model, missing keys, more experts per token than groups allow,
        and weights that are missing, of another shape, or left.
    """
    config = Config(config, "deepseek_v3")
    usable = config["topk_group"] * config["n_routed_experts"] // config["n_group"]
    if config["num_experts_per_tok"] > usable:
        raise ValueError(
            f"load: num_experts_per_tok={config['num_experts_per_tok']} is more than the {usable} "
            "experts of topk_group groups."
        )
    rope, rank = config["qk_rope_head_dim"], config["q_lora_rank"]
    names = _NAMES if rank is not None else _NAMES | {"query": "q_proj"}
    base = vars(families.model_config(config, families.Family(names)))
    settings = DeepSeekConfig(
        **base | {"head_dim": config["qk_nope_head_dim"] + rope},
        rope_dim=rope,
        value_dim=config["v_head_dim"],
        latent_dim=config["kv_lora_rank"],
        query_dim=rank,
        dense_layers=config["first_k_dense_replace"],
        num_experts=config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_dim=config["moe_intermediate_size"],
        shared_experts=config["n_shared_experts"],
        groups=(config["n_group"], config["topk_group"]),
        normalized=config["norm_topk_prob"],
        expert_scale=config["routed_scaling_factor"],
    )
    weights = DeepSeekWeights(State(state), names, settings.num_heads, settings.num_heads)
    return fill(lambda rngs: Decoder(settings, rngs=rngs), weights)
