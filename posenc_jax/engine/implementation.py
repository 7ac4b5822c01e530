"""The type of an attention implementation."""

import abc
import dataclasses
from typing import ClassVar

import jax

from posenc_jax.engine.problem import Problem


@dataclasses.dataclass(frozen=True)
class Implementation(abc.ABC):
    """One way to compute attention. Fields are its settings, such as block sizes.

    Every implementation returns the same numbers as "reference" to rounding, or says through
    `supports` why it cannot.
    """

    name: ClassVar[str]
    """The word for `attention(implementation=...)`."""

    def supports(self, problem: Problem) -> str | None:
        """Returns None, or why the problem cannot be computed and what to use instead."""
        return None

    @abc.abstractmethod
    def __call__(self, problem: Problem) -> tuple[jax.Array, jax.Array]:
        """Returns the output, [B, T, N, V] in q's dtype, and the log-sum-exp, float32 [B, T, N].

        A query that sees no key gets zeros and a log-sum-exp of -inf. Without a softmax
        (`problem.normalized` is false), the log-sum-exp has no meaning.
        """
