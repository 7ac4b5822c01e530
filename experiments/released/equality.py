"""The logits of a model and of transformers, from the same weights."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

INSTALL = "pip install transformers torch"


@dataclasses.dataclass(frozen=True)
class Equality:
    """Differences of logits [T, V].

    Attributes:
      tokens: T.
      largest, span: the greatest difference, and the range of the logits of transformers.
      same: the share of places whose greatest logit is of the same token.
      losses: nats per token, here and there.
    """

    tokens: int
    largest: float
    span: float
    same: float
    losses: tuple[float, float]

    def __str__(self) -> str:
        ours, theirs = self.losses
        return (
            f"The logits of {self.tokens} tokens differ from those of transformers by at most "
            f"{self.largest:.1e} of a range of {self.span:.1f}; the likeliest token is the same at "
            f"{self.same:.1%} of the places; loss {ours:.6f}, there {theirs:.6f}."
        )


def compare(logits: np.ndarray, theirs: np.ndarray, tokens: np.ndarray) -> Equality:
    """Returns the differences of logits [T, V] of tokens [T]."""
    return Equality(
        len(tokens),
        float(np.abs(logits - theirs).max()),
        float(theirs.max() - theirs.min()),
        float((logits.argmax(-1) == theirs.argmax(-1)).mean()),
        (_loss(logits, tokens), _loss(theirs, tokens)),
    )


def _loss(logits: np.ndarray, tokens: np.ndarray) -> float:
    shifted = logits[:-1].astype(np.float64) - logits[:-1].max(-1, keepdims=True)
    right = np.take_along_axis(shifted, tokens[1:, None], 1)[:, 0]
    return float((np.log(np.exp(shifted).sum(-1)) - right).mean())


def model_of_transformers(config: Mapping[str, Any], state: Mapping[str, np.ndarray]) -> Any:
    """Returns the float32 model of transformers; raises ValueError if it has other weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    arrays = {name: torch.from_numpy(np.array(array)) for name, array in state.items()}
    missing, left = model.load_state_dict(arrays, strict=False)
    if left or {*missing} - {"lm_head.weight"}:
        raise ValueError(f"transformers has other weights: missing {missing}, left {left}")
    model.tie_weights()
    return model


def logits_of_transformers(
    config: Mapping[str, Any], state: Mapping[str, np.ndarray], tokens: np.ndarray
) -> np.ndarray:
    """Returns the logits [T, V] of transformers, float32."""
    import torch

    with torch.no_grad():
        logits = model_of_transformers(config, state)(torch.from_numpy(tokens[None])).logits
    return logits[0].numpy()
