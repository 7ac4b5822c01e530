r"""Which scheme and window each layer of a model has.

Many models do not treat all layers alike: most layers are local, with RoPE and a window;
every few layers one sees everything, without positions or with a slower RoPE. As recipes,
for `num_layers` layers and D = head dim:

    SmolLM3     3 x RoPE(D, 2e6), NoPE
    Cohere 2    3 x RoPE(D, layout="interleaved") in a window of 4096, NoPE
    Llama 4     3 x RoPE(D, 5e5, layout="interleaved") in chunks of 8192,
                QueryTemperature("llama4", 8192)
    Gemma 3     5 x RoPE(D, 1e4) in a window, RoPE(D, 1e6), in larger ones with PI(8.0)
    Gemma 4     5 x RoPE(D, 1e4) in a window, RoPE(D, 1e6, scaling=Proportional(0.25)),
                and the last layer is as the sixth whatever its number

Chunks are segments: `segment_ids = positions // 8192`, in the layers that have them.

DroPE (Gelberg et al. 2025) needs no code: train with RoPE; put NoPE in its place, in all
layers, and train on for a small part of the time at the same length; beyond that length put
`QueryTemperature` in the place of NoPE. Schemes without parameters leave those of the model as
they are, so that a trained state fits the model made with another.

Papers: Yang et al. Rope to Nope and Back Again. 2025. https://arxiv.org/abs/2501.18795
DroPE: https://arxiv.org/abs/2512.12167
Reference code: huggingface/transformers 5.23, configuration_*.py of these models.
"""

import dataclasses

from posenc_jax.checks import require
from posenc_jax.mask import Window, window_sides
from posenc_jax.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one layer of attention is given.

    Attributes:
      scheme: its position encoding.
      window: its window, as in `attention`; None attends to all tokens.
      chunk_size: tokens attend only within chunks of this many positions: give the layer
        `segment_ids = positions // chunk_size`. None: no chunks.

    Raises:
      ValueError, TypeError: for what is no scheme, no window or no size.

    >>> LayerSpec(pe.NoPE()).window is None
    True
    """

    scheme: Scheme
    window: Window = None
    chunk_size: int | None = None

    def __post_init__(self):
        if not isinstance(self.scheme, Scheme):
            raise TypeError(f"layer: scheme must be a Scheme, got {self.scheme!r}.")
        window_sides(self.window)
        require(
            self.chunk_size is None or self.chunk_size >= 1,
            f"layer: chunk_size must be at least 1, got {self.chunk_size}.",
        )


def layer_pattern(
    num_layers: int, *pattern: LayerSpec | Scheme, last: LayerSpec | Scheme | None = None
) -> tuple[LayerSpec, ...]:
    """Returns a layer for each of `num_layers`, by repeating a pattern from the first on.

    Args:
      num_layers: how many there are.
      *pattern: layers in their order; a scheme is a layer that sees everything.
      last: the last layer, if the pattern does not say.

    Raises:
      ValueError: without layers or a pattern, or for a pattern that is longer than the
        layers, whose end would have no layer.
      TypeError: for what is neither a layer nor a scheme.

    >>> local = LayerSpec(pe.RoPE(head_dim=8), window=512)
    >>> [layer.window for layer in layer_pattern(6, local, local, pe.NoPE())]
    [512, 512, None, 512, 512, None]
    """
    require(num_layers >= 1, f"layer_pattern: num_layers must be at least 1, got {num_layers}.")
    require(
        1 <= len(pattern) <= num_layers,
        f"layer_pattern: the pattern must have from 1 to {num_layers} layers, got {len(pattern)}.",
    )
    layers = tuple(x if isinstance(x, LayerSpec) else LayerSpec(x) for x in pattern)
    repeated = tuple(layers[i % len(layers)] for i in range(num_layers))
    if last is None:
        return repeated
    return (*repeated[:-1], last if isinstance(last, LayerSpec) else LayerSpec(last))
