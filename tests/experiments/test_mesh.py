"""Training on eight devices: the losses of one device."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from experiments.errors import ConfigError
from experiments.runs.checkpoints import Checkpoints, Deadline, OutOfTime
from experiments.runs.experiment import from_file
from experiments.runs.run_queue import sharded
from experiments.settings.common import Train
from experiments.training import mesh
from experiments.training.train import compiled, new_state, train
from tests.support import slow

SCHEME = "rope+t5"
SEEDS = [0]
TABLES = {
    "name": "small",
    "seeds": 1,
    "tasks": ["kback"],
    "schemes": {"names": [SCHEME]},
    "kback": {
        "test_lengths": [32, 48],
        "eval_batch": 8,
        "eval_batches": 1,
        "model": {"model_dim": 16, "num_layers": 1, "num_heads": 2},
        "train": {"steps": 4, "steps_per_call": 2, "warmup": 1, "batch": 8, "learning_rate": 0.03},
    },
}
EXPERIMENT = from_file(TABLES)
TASK, POSITION = EXPERIMENT.tasks["kback"], EXPERIMENT.scheme("kback", SCHEME)
COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
NOISE = 1.5e-5  # The curve has five digits; parameters differ by less than 1e-6.


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the part of an array that a device has; a leaf of trees."""

    sizes: tuple[int, ...]


@functools.cache
def on_one_device():
    return train(TASK, POSITION, SEEDS, None)


def assert_equal_to_one_device(trained):
    expected = on_one_device()
    np.testing.assert_allclose(trained.curve["loss"], expected.curve["loss"], atol=NOISE)
    assert trained.curve["step"] == [2, 4] and trained.parameters == expected.parameters
    for a, b in zip(*(jax.tree.leaves(x.params) for x in (trained, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=NOISE)


def program(text):
    """The compiled program on a mesh, and the kinds of its collectives."""
    call = compiled(TASK, POSITION, len(SEEDS), None, mesh.make(text, sharded(TASK)))
    found = re.findall(rf" ({COLLECTIVES})(?:-start)?\(", call.as_text())
    return call, set(found)


@pytest.mark.parametrize(
    "text",
    ["data=4,tensor=2", *(pytest.param(t, marks=slow) for t in ("data=8", "sequence=8"))],
)
def test_training_on_a_mesh_equals_that_on_one_device(text):
    on = mesh.make(text, sharded(TASK))
    assert_equal_to_one_device(train(TASK, POSITION, SEEDS, None, mesh=on))


def test_devices_draw_and_compute_their_own_sequences_and_heads():
    call, collectives = program("data=4,tensor=2")
    assert collectives == {"all-reduce"}
    text = call.as_text()
    shapes = set(re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", text))
    assert {"1,2,33", "1,2,32,1,8", "1,16,32"} <= shapes  # Tokens, q of one head, half of the MLP.
    assert not {s for s in shapes if re.match(r"(1,)?8,3[23]\b", s)}  # A batch has 8 sequences.
    (params, moments), *others = call.input_shardings[0]
    state = new_state(on_one_device().params, TASK)
    shapes = jax.tree.map(lambda x, s: Sizes(s.shard_shape(x.shape)), state, (params, moments))
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): sizes
        for path, sizes in jax.tree.leaves_with_path(shapes[0])
    }
    expected = {
        "blocks/0/attention/query/kernel": (1, 16, 1, 8),
        "blocks/0/attention/out/kernel": (1, 1, 8, 16),
        "blocks/0/attention/encoding/parameters/1/table": (1, 1, 32),
        "blocks/0/up/kernel": (1, 16, 32),
        "blocks/0/down/kernel": (1, 32, 16),
        "head/kernel": (1, 16, 17),  # No multiple of 2.
    }
    assert {name: named[name].sizes for name in expected} == expected
    found = [x.sizes for x in jax.tree.leaves(shapes[1]) if x.sizes != (1,)]  # Without the counts.
    assert found == 2 * [x.sizes for x in named.values()]
    assert all(x.is_fully_replicated for x in jax.tree.leaves(others))


@slow
def test_keys_of_a_sharded_sequence_travel():
    assert program("sequence=8")[1] == {"all-reduce", "collective-permute"}


def test_a_run_continues_on_another_number_of_devices(tmp_path):
    def checkpoint(minutes):
        return Checkpoints(tmp_path / "states", Deadline(minutes), pytest.fail)

    on = mesh.make("data=4,tensor=2", sharded(TASK))
    with pytest.raises(OutOfTime):
        train(TASK, POSITION, SEEDS, None, checkpoint=checkpoint(0.0), mesh=on)
    trained = train(TASK, POSITION, SEEDS, None, checkpoint=checkpoint(1.0))
    assert_equal_to_one_device(trained)


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("data=4,heads=2", {}, "unknown axis 'heads'; known: data, tensor, sequence"),
        ("data=4", {}, "data=4 is for 4 devices, there are 8"),
        ("data=2,data=4", {}, "must be such as data=4,tensor=2, got 'data=2,data=4'"),
        ("data=0", {}, "must be such as data=4,tensor=2, got 'data=0'"),
        ("data=8", {"train": Train(batch=12)}, "data=8 does not divide kback.train.batch = 12"),
        ("tensor=8", {}, "tensor=8 does not divide kback.model.num_heads = 2"),
        ("sequence=8", {"train_length": 36}, "sequence=8 does not divide kback.train_length = 36"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(text, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        mesh.make(text, sharded(dataclasses.replace(TASK, **changes)))
