"""Runs that do as they are told, for tests of queues: nothing is trained."""

import dataclasses
import os
import signal
import time
import types

import jax.numpy as jnp

from experiments.models.schemes import find
from experiments.runs.executors import processors
from experiments.runs.run import Run
from experiments.settings.common import Model, Train
from experiments.tasks import KBack

TINY = """
[{0}.model]
model_dim = 16
num_layers = 1
num_heads = 2
[{0}.train]
steps = 4
steps_per_call = 2
warmup = 1
batch = 4
"""
KBACK = f"""
[kback]
test_lengths = [32, 48]
eval_batch = 8
eval_batches = 1
{TINY.format("kback")}"""
TASK = KBack(
    test_lengths=(32, 48),
    eval_batch=4,
    eval_batches=1,
    model=Model(model_dim=16, num_layers=1, num_heads=2),
    train=Train(steps=4, steps_per_call=2, warmup=1, batch=4),
)


@dataclasses.dataclass(frozen=True)
class Obedient(Run):
    """Its scores are its seed, the process and its processors; `order` says what else it does."""

    order: str = ""

    def train(self, data, *, checkpoint):
        word, _, path = self.order.partition(" after ")
        if word == "die":
            while not os.path.exists(path):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.order == "raise":
            raise RuntimeError("no\nmemory")
        if self.order == "wait":
            checkpoint.path.mkdir(parents=True, exist_ok=True)
        while self.order == "wait":
            time.sleep(0.01)
            checkpoint.save({"x": jnp.ones(1)}, {"step": [2], "loss": [0.0]}, (0.0, 0.0), 4)
        return types.SimpleNamespace(diverged=None)

    def measure(self, trained, data):
        (processor, *more) = processors()
        scores = {"seed": self.seed, "process": os.getpid(), "processor": processor}
        device = int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0])
        return {"scores": {"plain": scores | {"others": len(more), "device": device}}}


def order(seed, text=""):
    """Returns a run."""
    return Obedient(TASK, "none", {}, find("none")(), seed, text)
