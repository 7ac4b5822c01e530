"""The model of `experiments.models.model` and its training step in PyTorch, in the usual way.

Without positions, or with RoPE. Parameters are copied from JAX, and the losses of the first steps
must equal the losses of the JAX step; see `equal`.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.runs.environment import usable_cores
from experiments.settings.common import Train
from experiments.tasks import Task

SCHEMES = ("none", "rope")
_KERNELS = {"query": "q", "key": "k", "value": "v", "out": "o"}


def torch_steps(
    task: Task, scheme: str, params: Any, tokens: np.ndarray, *, compiled: bool
) -> Callable[[], np.ndarray]:
    """Returns a function that takes one step per batch and returns the losses.

    Args:
      task: sizes and settings of training.
      scheme: one of SCHEMES.
      params: the state of a `LanguageModel`, of one seed.
      tokens: the batches, int [steps, B, T + 1].
      compiled: whether `torch.compile` compiles the model.
    """
    import torch

    torch.set_num_threads(usable_cores())
    model = _model(task, scheme)
    _copy(model, params)
    call = torch.compile(model) if compiled else model
    train = task.train
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=train.learning_rate,
        betas=(0.9, train.b2),
        weight_decay=train.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(train, step))
    batches = [torch.from_numpy(x.astype(np.int64)) for x in tokens]

    def steps():
        losses = []
        for batch in batches:
            logits = call(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        return torch.stack(losses).numpy()

    return steps


def _rate(train: Train, step: int) -> float:
    if step < train.warmup:
        return step / train.warmup
    part = (step - train.warmup) / (train.steps - train.warmup)
    cosine = 0.5 * (1 + np.cos(np.pi * min(part, 1.0)))
    return float((1 - train.final_rate) * cosine + train.final_rate)


def _model(task: Task, scheme: str) -> Any:
    import torch
    from torch import nn

    sizes, length = task.model, task.train_length
    heads, head_dim = sizes.num_heads, sizes.head_dim
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(length)[:, None] * frequencies
    cosines, sines = angles.cos(), angles.sin()

    def rotate(x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cosines - b * sines, b * cosines + a * sines], -1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            width = sizes.model_dim
            self.norm1, self.norm2 = (nn.RMSNorm(width, eps=1e-6) for _ in range(2))
            self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
            self.o = nn.Linear(width, width, bias=False)
            self.up = nn.Linear(width, sizes.mlp_factor * width, bias=False)
            self.down = nn.Linear(sizes.mlp_factor * width, width, bias=False)

        def forward(self, x):
            y = self.norm1(x)
            q, k, v = (
                p(y).unflatten(-1, (heads, head_dim)).transpose(1, 2)
                for p in (self.q, self.k, self.v)
            )
            if scheme == "rope":
                q, k = rotate(q), rotate(k)
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(out.transpose(1, 2).flatten(2))
            hidden = nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh")
            return x + self.down(hidden)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(task.vocab_size, sizes.model_dim)
            self.blocks = nn.ModuleList(Block() for _ in range(sizes.num_layers))
            self.norm = nn.RMSNorm(sizes.model_dim, eps=1e-6)
            self.head = nn.Linear(sizes.model_dim, task.vocab_size, bias=False)

        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Model()


def _copy(model: Any, params: Any) -> None:
    """Copies the parameters of a `LanguageModel` into the model."""
    import torch

    def put(target: Any, x: jax.Array, *shape: int) -> None:
        array = np.array(x, np.float32).reshape(shape or x.shape)
        target.copy_(torch.from_numpy(array.T.copy() if array.ndim == 2 else array))

    with torch.no_grad():
        model.embed.weight.copy_(torch.from_numpy(np.array(params["embed"]["embedding"])))
        put(model.norm.weight, params["norm"]["scale"])
        put(model.head.weight, params["head"]["kernel"])
        for i, block in enumerate(model.blocks):
            ours = params["blocks"][i]
            width = block.q.weight.shape[0]
            for name in ("norm1", "norm2"):
                put(getattr(block, name).weight, ours[name]["scale"])
            for name in ("up", "down"):
                put(getattr(block, name).weight, ours[name]["kernel"])
            for name, target in _KERNELS.items():
                put(
                    getattr(block, target).weight,
                    ours["attention"][name]["kernel"],
                    width,
                    width,
                )


def equal(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Returns the difference between losses of the first steps in words; empty if small."""
    error = np.abs(ours - theirs).max()
    return "" if error <= 2e-3 else f"losses differ by {error:.1e}"
