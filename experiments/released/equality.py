"""The logits of a model and of transformers, from the same weights."""

from collections.abc import Mapping
from typing import Any

import numpy as np

INSTALL = "pip install transformers torch"


def compare(logits: np.ndarray, theirs: np.ndarray, tokens: np.ndarray) -> str:
    """Returns a sentence about the differences of logits [T, V] of tokens [T]."""
    return (
        f"The logits of {len(tokens)} tokens differ from those of transformers by at most "
        f"{np.abs(logits - theirs).max():.1e} of a range of {np.ptp(theirs):.1f}; the likeliest "
        f"token is the same at {(logits.argmax(-1) == theirs.argmax(-1)).mean():.1%} of the "
        f"places; loss {_loss(logits, tokens):.6f}, there {_loss(theirs, tokens):.6f}."
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
