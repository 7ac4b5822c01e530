"""Loss at every place of one long text, in one pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.decoder import Decoder

_CHUNK = 512  # Tokens whose logits are held at once: 96 MiB for a vocabulary of 49152.


class Losses:
    """The losses of a model on texts; a program for each method and length is compiled once.

    Parameters stay arguments: `set_method` on the model between calls changes the program, another
    text of the same length does not.
    """

    def __init__(self, model: Decoder):
        self.model = model

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the loss of each token but the first in nats, float32 [T - 1].

        Args:
          tokens: integers [T].
        """
        graph, state = nnx.split(self.model)
        return np.asarray(_losses(graph, state, jnp.asarray(tokens, jnp.int32)))


@functools.partial(jax.jit, static_argnums=0)
def _losses(graph, state, tokens):
    model = nnx.merge(graph, state)
    inputs, targets = tokens[:-1], tokens[1:]
    hidden = model(inputs[None], hidden=True)[0]
    count = len(inputs)
    padded = -(-count // _CHUNK) * _CHUNK
    hidden = jnp.pad(hidden, ((0, padded - count), (0, 0))).reshape(-1, _CHUNK, hidden.shape[-1])
    targets = jnp.pad(targets, (0, padded - count)).reshape(-1, _CHUNK)

    def chunk(part):
        hidden, targets = part
        logits = model.logits(hidden[None])[0].astype(jnp.float32)
        right = jnp.take_along_axis(logits, targets[:, None], 1)[:, 0]
        return jax.nn.logsumexp(logits, axis=-1) - right

    return jax.lax.map(chunk, (hidden, targets)).reshape(-1)[:count]
