"""Loss at every place of one long text, in one pass."""

import dataclasses
import functools
import itertools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import posenc_jax as pe
from examples.decoder import Decoder
from posenc_jax.nnx import PositionEncoding

_CHUNK = 512  # Tokens whose logits are held at once: 96 MiB for a vocabulary of 49152.


class Scores(NamedTuple):
    """The prediction of each token of a text but the first, [T - 1].

    Attributes:
      losses: float32, in nats; NaN where it was not asked for.
      hits: bool, whether no other token had a greater logit.
    """

    losses: np.ndarray
    hits: np.ndarray


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled pass over texts of one length.

    Attributes:
      run, state: the program, and the parameters of the model.
      seconds: of processor time that compilation took.
    """

    run: Any
    state: Any
    seconds: float

    def __call__(self, tokens: np.ndarray, scored: np.ndarray | bool = True) -> Scores:
        """Returns the scores of tokens [T], at least at the places `scored` (bool, [T - 1])."""
        places = jnp.broadcast_to(scored, len(tokens) - 1)
        scores = self.run(self.state, jnp.asarray(tokens, jnp.int32), places)
        return Scores(*map(np.asarray, scores))

    @property
    def temporary_bytes(self) -> int:
        """Memory of a pass without the parameters, by the compiler's account."""
        return self.run.memory_analysis().temp_size_in_bytes


def set_method(model: Decoder, *layers: pe.LayerSpec) -> None:
    """Gives the blocks of an `examples.decoder.Decoder` the schemes and windows of layers.

    One layer is for all blocks. Schemes have no parameters, so the model's are unchanged.
    """
    for block, layer in zip(model.blocks, itertools.cycle(layers), strict=False):
        if block.attention.position != layer.scheme:
            block.attention.encoding = PositionEncoding(layer.scheme, rngs=nnx.Rngs(0))
        block.attention.window = layer.window


def compiled(model: Decoder, count: int) -> Program:
    """Returns the pass of a model, as it is now, over texts of `count` tokens."""
    began = time.process_time()
    graph, state = nnx.split(model)
    tokens, scored = ((count,), jnp.int32), ((count - 1,), bool)
    shapes = (jax.ShapeDtypeStruct(*x) for x in (tokens, scored))
    run = _scores.lower(graph, state, *shapes).compile()
    return Program(run, state, time.process_time() - began)


@functools.partial(jax.jit, static_argnums=0)
def _scores(graph, state, tokens, scored):
    model = nnx.merge(graph, state)
    inputs, targets = tokens[:-1], tokens[1:]
    hidden = model(inputs[None], hidden=True)[0]
    count = len(inputs)
    padded = -(-count // _CHUNK) * _CHUNK
    hidden = jnp.pad(hidden, ((0, padded - count), (0, 0))).reshape(-1, _CHUNK, hidden.shape[-1])
    targets, scored = (
        jnp.pad(x, (0, padded - count)).reshape(-1, _CHUNK) for x in (targets, scored)
    )

    def of_chunk(hidden, targets):
        logits = model.logits(hidden[None])[0].astype(jnp.float32)
        right = jnp.take_along_axis(logits, targets[:, None], 1)[:, 0]
        return jax.nn.logsumexp(logits, axis=-1) - right, right >= logits.max(-1)

    def without(hidden, targets):
        return jnp.full(_CHUNK, jnp.nan), jnp.zeros(_CHUNK, bool)

    # Logits of a large vocabulary take up to half of a pass.
    scores = jax.lax.map(
        lambda chunk: jax.lax.cond(chunk[0].any(), of_chunk, without, *chunk[1:]),
        (scored, hidden, targets),
    )
    return jax.tree.map(lambda x: x.reshape(-1)[:count], scores)
