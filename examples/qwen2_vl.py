"""Qwen2-VL: a decoder with M-RoPE, and a vision tower whose images are packed into one row."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import posenc_jax as pe
from examples import decoder, families
from examples.decoder import Block, Decoder, ModelConfig
from examples.weights import Config, State, Weights, fill

Grids = Sequence[tuple[int, int, int]]


def patch_places(grids: Grids, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Where patches are, in the order in which the processor has them.

    The `merge` x `merge` patches that become one token follow each other.

    Args:
      grids: frames, rows and columns of patches of each image.
      merge: rows and columns of patches per token.

    Returns:
      Rows and columns [2, 1, P], and a number for each frame [1, P]; patches see their own frame.
    """
    places, frames, count = [], [], 0
    for time, rows, columns in grids:
        place = np.indices((rows, columns)).reshape(
            2, rows // merge, merge, columns // merge, merge
        )
        place = place.transpose(0, 1, 3, 2, 4).reshape(2, -1)
        places.append(np.tile(place, time))
        frames.append(count + np.repeat(np.arange(time), rows * columns))
        count += time
    return np.concatenate(places, 1)[:, None], np.concatenate(frames)[None]


class VisionTower(nnx.Module):
    """Patches to tokens."""

    def __init__(self, config: ModelConfig, patch_dim: int, merge: int, width: int, rngs: nnx.Rngs):
        dim = config.model_dim * merge**2
        self.patch = nnx.Linear(patch_dim, config.model_dim, use_bias=False, rngs=rngs)
        self.blocks = nnx.List(
            Block(config, i, layer, rngs) for i, layer in enumerate(config.layers)
        )
        self.merger_norm = config.new_norm(rngs)
        self.merger_up = nnx.Linear(dim, dim, rngs=rngs)
        self.merger_down = nnx.Linear(dim, width, rngs=rngs)
        self.merge = merge

    def __call__(self, patches: jax.Array, grids: Grids) -> jax.Array:
        """Returns tokens [P / merge^2, D] of all images, for patches [P, numbers of a patch]."""
        places, frames = (jnp.asarray(x, jnp.int32) for x in patch_places(grids, self.merge))
        positions = pe.positions.from_segment_ids(frames)
        x = self.patch(patches)[None]
        for block in self.blocks:
            x, _ = block(x, positions=positions, coordinates=places, segment_ids=frames)
        x = self.merger_norm(x).reshape(-1, self.merger_up.in_features)
        return self.merger_down(jax.nn.gelu(self.merger_up(x), approximate=False))


class Qwen2VL(nnx.Module):
    """Text with images."""

    def __init__(
        self,
        language: ModelConfig,
        vision: ModelConfig,
        patch_dim: int,
        merge: int,
        image_token: int,
        rngs: nnx.Rngs,
    ):
        self.language = Decoder(language, rngs=rngs)
        self.vision = VisionTower(vision, patch_dim, merge, language.model_dim, rngs)
        self.image_token = image_token

    def inputs(self, tokens, mask, patches, grids: Sequence[Grids]) -> dict[str, jax.Array]:
        """Returns the arguments of a call of the decoder for tokens with images.

        Args:
          tokens: integers [B, T], an image token for each token of an image.
          mask: bool [B, T], true for tokens.
          patches: the patches of all images of the batch, [P, numbers of a patch].
          grids: for each row its images, in patches: frames, rows and columns.

        Returns:
          `inputs` [B, T, D], `coordinates` [3, B, T] and `delta` [B]; see
          `posenc_jax.mrope_coordinates`. Nothing for a batch without images, which needs none.
        """
        if not any(grids):
            return {}
        _, segment_ids = pe.positions.from_padding_mask(mask)
        is_image = (tokens == self.image_token) & mask
        # Images need no token of the vocabulary.
        text = self.language.embed(tokens, jnp.where(is_image, -1, segment_ids))
        images = self.vision(patches, [grid for row in grids for grid in row])
        index = (jnp.cumsum(is_image.ravel()) - 1).reshape(is_image.shape)
        pixels = images[jnp.maximum(index, 0)]
        x = jnp.where(is_image[..., None], pixels, text)
        sizes = np.zeros((len(grids), max(map(len, grids)), 3), np.int32)
        for b, row in enumerate(grids):
            for i, (time, rows, columns) in enumerate(row):
                sizes[b, i] = time, rows // self.vision.merge, columns // self.vision.merge
        coordinates, delta = pe.mrope_coordinates(
            is_image, jnp.asarray(sizes), segment_ids=segment_ids
        )
        return {"inputs": x, "coordinates": coordinates, "delta": delta}


def generate(model: Qwen2VL, tokens, steps: int, mask, patches, grids, **options):
    """Continues text, as `decoder.generate`; other arguments as `Qwen2VL.inputs`."""
    options |= model.inputs(tokens, mask, patches, grids)
    return decoder.generate(model.language, tokens, steps, mask=mask, **options)


_VISION = {
    "patch": "model.visual.patch_embed.proj",
    "blocks": "model.visual.blocks",
    "attention_norm": "norm1",
    "attention": "attn",
    "out": "proj",
    "mlp_norm": "norm2",
    "up": "fc1",
    "down": "fc2",
    "merger_norm": "model.visual.merger.ln_q",
    "merger_up": "model.visual.merger.mlp.0",
    "merger_down": "model.visual.merger.mlp.2",
}


class QwenWeights(Weights):
    """A state dict of Qwen2-VL by paths of our modules."""

    def __init__(self, state: State, language: ModelConfig, vision: ModelConfig):
        self.state = state
        heads = vision.num_heads
        self.vision = Weights(state, _VISION, heads, heads, qkv="concatenated")
        self.language = families.weights(families.FAMILIES["qwen2_vl_text"], language, state)

    def __call__(self, path):
        """The array for a parameter."""
        return (self.vision if path[0] == "vision" else self.language)(path[1:])


def load(config: Mapping[str, Any], state: Mapping[str, Any]) -> Qwen2VL:
    """The model of a Hugging Face config, with the weights of a state dict.

    Args:
      config: the dict of a whole config of Qwen2-VL.
      state: {name: array} of the parameters, tied ones once.

    Raises:
      ValueError: for another type of model, missing keys, and weights that are missing, of
        another shape, or left.
    """
    config = Config(config, "qwen2_vl")
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]}
    language = families.model_config(tied | config["text_config"])
    tower = Config(config["vision_config"] | {"model_type": "qwen2_vl"}, "qwen2_vl")
    head_dim = tower["embed_dim"] // tower["num_heads"]
    theta = (tower.get("rope_parameters") or {}).get("rope_theta", 1e4)
    rope = pe.AxialRoPE(head_dim=head_dim, theta=theta, axes=(0, 1), layout="half")
    vision = ModelConfig(
        layers=(pe.LayerSpec(rope),) * tower["depth"],
        vocabulary=0,
        model_dim=tower["embed_dim"],
        num_heads=tower["num_heads"],
        num_kv_heads=tower["num_heads"],
        head_dim=head_dim,
        mlp_dim=int(tower["embed_dim"] * tower["mlp_ratio"]),
        norm="layer",
        activation=tower["hidden_act"],
        gated=False,
        attention_bias=True,
        mlp_bias=True,
        is_causal=False,
    )
    patch_dim = tower["in_channels"] * tower["temporal_patch_size"] * tower["patch_size"] ** 2
    sizes = patch_dim, tower["spatial_merge_size"], config["image_token_id"]
    weights = QwenWeights(State(state), language, vision)
    return fill(lambda rngs: Qwen2VL(language, vision, *sizes, rngs), weights)
