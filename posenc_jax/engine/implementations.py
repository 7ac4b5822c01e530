"""The list of implementations, and which one `attention` chooses.

A new one is a file with an `Implementation`, and a line in `IMPLEMENTATIONS`.
"""

from posenc_jax.engine.dense import Dense
from posenc_jax.engine.implementation import Implementation
from posenc_jax.engine.jax_nn import JaxNN
from posenc_jax.engine.problem import Problem
from posenc_jax.engine.reference import Reference
from posenc_jax.engine.xla import XLA

IMPLEMENTATIONS: dict[str, Implementation] = {
    made.name: made for made in (Reference(), Dense(), XLA(), JaxNN())
}
"""Implementations by the word for `attention(implementation=...)`."""


def find(implementation: str | Implementation) -> Implementation:
    """Returns the implementation of a word, or the value given.

    Raises:
      ValueError: for an unknown word.
      TypeError: for anything else.
    """
    if isinstance(implementation, Implementation):
        return implementation
    if not isinstance(implementation, str):
        raise TypeError(
            "attention: implementation must be a word, an Implementation or None, "
            f"got {implementation!r}."
        )
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention: implementation must be None or one of {tuple(IMPLEMENTATIONS)}, "
            f"got {implementation!r}."
        )
    return IMPLEMENTATIONS[implementation]


def choose(problem: Problem, platform: str) -> Implementation:
    """Returns the fastest implementation for a problem on a platform.

    Whole rows for a decode step and for what is smaller than any tile worth compiling, tiles
    for all else. Measured on CPU, forward and backward with a learned bias: tiles are ahead
    from T = 32 on. Nothing was measured on other platforms yet.

    Args:
      problem: what to compute.
      platform: "cpu", "gpu" or "tpu".
    """
    small = problem.length == 1 or problem.length * problem.keys < 32 * 32
    order = ("dense", "xla") if small else ("xla", "dense")
    candidates = (IMPLEMENTATIONS[name] for name in order)
    return next(found for found in candidates if found.supports(problem) is None)
