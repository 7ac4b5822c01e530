"""Swin Transformer: attention within windows, which every second block shifts."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import posenc_jax as pe
from examples.decoder import MLP, ModelConfig
from examples.weights import Config, State, Weights, fill
from posenc_jax.nnx import Attention


def to_windows(x: jax.Array, size: int) -> jax.Array:
    """Returns windows [B * R / size * C / size, size^2, ...] of a grid [B, R, C, ...]."""
    batch, rows, columns, *features = x.shape
    x = x.reshape(batch, rows // size, size, columns // size, size, *features)
    return jnp.moveaxis(x, 2, 3).reshape(-1, size * size, *features)


def from_windows(x: jax.Array, size: int, rows: int, columns: int) -> jax.Array:
    """Returns the grid [B, R, C, D] of its windows."""
    x = x.reshape(-1, rows // size, columns // size, size, size, x.shape[-1])
    return jnp.moveaxis(x, 3, 2).reshape(-1, rows, columns, x.shape[-1])


def regions(rows: int, columns: int, size: int, shift: int) -> np.ndarray:
    """Returns int32 [1, R, C], different for neighbours that a cyclic shift brought together."""

    def along(length):
        index = np.arange(length)
        return (index >= length - size).astype(np.int32) + (index >= length - shift)

    return (along(rows)[:, None] * 3 + along(columns))[None]


class Block(nnx.Module):
    """Attention within windows and MLP, with norms before them."""

    def __init__(self, config: ModelConfig, layer: pe.LayerSpec, shifted: bool, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = config.new_norm(rngs), config.new_norm(rngs)
        self.attention = Attention(
            config.model_dim, config.num_heads, position=layer, use_bias=True, rngs=rngs
        )
        self.mlp = MLP(config, rngs)
        assert isinstance(layer.scheme, pe.Swin), layer.scheme
        self.window = layer.scheme.window[0]
        self.shift = self.window // 2 if shifted else 0

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns a grid [B, R, C, D]."""
        (batch, rows, columns, _), size = x.shape, self.window
        if rows % size or columns % size:
            raise ValueError(f"Swin: windows of {size} do not divide a grid of {rows} x {columns}.")
        shift = self.shift if min(rows, columns) > size else 0  # As in the published models.
        y, segment_ids = self.attention_norm(x), None
        if shift:
            y = jnp.roll(y, (-shift, -shift), (1, 2))
            numbers = jnp.asarray(regions(rows, columns, size, shift))
            segment_ids = jnp.tile(to_windows(numbers, size), (batch, 1))
        # `Swin` reads a window row by row; by default positions would restart in each region.
        y = self.attention(
            to_windows(y, size), positions=jnp.arange(size * size), segment_ids=segment_ids
        )
        y = from_windows(y, size, rows, columns)
        x = x + (jnp.roll(y, (shift, shift), (1, 2)) if shift else y)
        return x + self.mlp(self.mlp_norm(x))


class Stage(nnx.Module):
    """Blocks; all stages except the last then merge four patches into one."""

    def __init__(self, config: ModelConfig, is_last: bool, rngs: nnx.Rngs):
        layers = enumerate(config.layers)
        self.blocks = nnx.List(Block(config, layer, i % 2 == 1, rngs) for i, layer in layers)
        wide = dataclasses.replace(config, model_dim=4 * config.model_dim, epsilon=1e-5)
        self.merge_norm = None if is_last else wide.new_norm(rngs)
        dims = wide.model_dim, 2 * config.model_dim
        self.merge = None if is_last else nnx.Linear(*dims, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns a grid [B, R, C, D]; [B, R / 2, C / 2, 2 D] where patches are merged."""
        for block in self.blocks:
            x = block(x)
        if self.merge is None or self.merge_norm is None:
            return x
        parts = [x[:, row::2, column::2] for column in range(2) for row in range(2)]
        return self.merge(self.merge_norm(jnp.concatenate(parts, -1)))


class Swin(nnx.Module):
    """An image classifier."""

    def __init__(
        self, stages: Sequence[ModelConfig], patch: tuple[int, int], labels: int, rngs: nnx.Rngs
    ):
        first, last = stages[0], stages[-1]
        self.size, channels = patch
        self.patch = nnx.Linear(channels * self.size**2, first.model_dim, rngs=rngs)
        self.patch_norm = dataclasses.replace(first, epsilon=1e-5).new_norm(rngs)
        self.stages = nnx.List(Stage(stage, stage is last, rngs) for stage in stages)
        self.norm = last.new_norm(rngs)
        self.output = nnx.Linear(last.model_dim, labels, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits [B, labels] of images [B, rows, columns, channels]."""
        batch, rows, columns, channels = images.shape
        size = self.size
        x = images.reshape(batch, rows // size, size, columns // size, size, channels)
        x = x.transpose(0, 1, 3, 5, 2, 4).reshape(batch, rows // size, columns // size, -1)
        x = self.patch_norm(self.patch(x))
        for stage in self.stages:
            x = stage(x)
        return self.output(self.norm(x).mean((1, 2)))


_NAMES = {
    "patch": "swin.embeddings.patch_embeddings.projection",
    "patch_norm": "swin.embeddings.norm",
    "stages": "swin.encoder.layers",
    "attention_norm": "layernorm_before",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "encoding": "relative_position_bias.relative_position_bias_table",
    "mlp_norm": "layernorm_after",
    "up": "fc1",
    "down": "fc2",
    "merge_norm": "downsample.norm",
    "merge": "downsample.reduction",
    "norm": "swin.layernorm",
    "output": "classifier",
}


class SwinWeights(Weights):
    """A state dict of Swin by paths of our modules; stages have different numbers of heads."""

    def __init__(self, state: State, num_heads: Sequence[int]):
        super().__init__(state, _NAMES, 0, 0)
        self.heads = num_heads

    def __call__(self, path):
        """The array for a parameter."""
        if path[0] == "stages":
            self.num_heads = self.num_kv_heads = self.heads[path[1]]
        is_table = path[-1] == "table"
        return self.state.take(self.name(*path[:-1])).T if is_table else super().__call__(path)


def load(config: Mapping[str, Any], state: Mapping[str, Any]) -> Swin:
    """The model of a Hugging Face config, with the weights of a state dict.

    Args:
      config: the dict of a whole config of Swin.
      state: {name: array} of the parameters, tied ones once.

    Raises:
      ValueError: for settings that are not supported, missing keys, and weights that are missing,
        of another shape, or left.
    """
    config = Config(config, "swin")
    if not config["qkv_bias"]:
        raise ValueError("load: qkv_bias=False is not supported.")
    layers, stages = pe.from_hf(config), []
    for i, (depth, heads) in enumerate(zip(config["depths"], config["num_heads"], strict=True)):
        dim, start = config["embed_dim"] * 2**i, sum(config["depths"][:i])
        stages.append(
            ModelConfig(
                layers=layers[start : start + depth],
                vocabulary=0,
                model_dim=dim,
                num_heads=heads,
                num_kv_heads=heads,
                head_dim=dim // heads,
                mlp_dim=int(dim * config["mlp_ratio"]),
                norm="layer",
                epsilon=config["layer_norm_eps"],
                activation=config["hidden_act"],
                gated=False,
                mlp_bias=True,
                is_causal=False,
            )
        )
    patch, labels = (config["patch_size"], config["num_channels"]), len(state["classifier.bias"])
    weights = SwinWeights(State(state), config["num_heads"])
    return fill(lambda rngs: Swin(stages, patch, labels, rngs), weights)
