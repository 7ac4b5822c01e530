"""The model, its training and its evaluation: only the position encoding differs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import posenc_jax as pe
from experiments.models.methods import varied
from experiments.models.model import (
    LanguageModel,
    count_parameters,
    initialize,
    seed_key,
    structure,
    token_losses,
)
from experiments.runs.experiment import Experiment
from experiments.settings.common import Model, Train
from experiments.tasks import Copy, KBack, Text
from experiments.tasks.base import Data
from experiments.training.train import make_optimizer, mean_loss, train
from tests.support import KINDS, slow

SIZES = Model(model_dim=16, num_layers=1, num_heads=2)
TWO_LAYERS = dataclasses.replace(SIZES, num_layers=2)
ROPE = pe.RoPE(head_dim=8)
TASK = KBack(
    test_lengths=(32, 48),
    model=SIZES,
    train=Train(steps=4, steps_per_call=2, warmup=1, batch=4),
    eval_batch=8,
    eval_batches=1,
    schemes={"t5": {"max_distance": 32}, "deberta": {"span": 16}},
)


def make(name, task=TASK):
    return Experiment(tasks={task.name: task}).scheme(task.name, name)


def new_model(layers, sizes=SIZES, vocab_size=TASK.vocab_size):
    return LanguageModel(sizes, layers, vocab_size, jax.random.key(0))


@functools.cache
def model(name):
    return new_model(make(name))


def without_scheme(state):
    leaves = ((jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(state))
    return {p: leaf for p, leaf in leaves if "positions" not in p and "encoding" not in p}


@pytest.mark.parametrize("name", KINDS)
def test_other_parameters_do_not_depend_on_the_scheme(name):
    plain = without_scheme(nnx.state(model("none")))
    other = without_scheme(nnx.state(model(name)))
    assert plain.keys() == other.keys()
    for path, leaf in plain.items():
        np.testing.assert_array_equal(leaf, other[path])


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("sinusoidal", 0),
        ("learned", 48 * 16),
        ("t5", 2 * 32),  # One table for all layers, as the authors have it.
        ("shaw", 2 * 2 * 33 * 8),  # Keys and values, in each layer.
    ],
)
def test_parameters_of_a_scheme(name, extra):
    def count(scheme):
        init = functools.partial(initialize, TWO_LAYERS, scheme, TASK.vocab_size)
        return count_parameters(jax.eval_shape(init, seed_key(0, "data")))

    assert count(make(name)) - count(make("none")) == extra


def test_model_is_causal():
    tokens = np.random.default_rng(0).integers(0, TASK.vocab_size, (1, 20)).repeat(2, 0)
    tokens[1, 12:] = 3
    out = np.asarray(jax.jit(model("short_conv"))(tokens))
    np.testing.assert_allclose(out[0, :12], out[1, :12], atol=1e-6)
    assert np.abs(out[0, 12:] - out[1, 12:]).max() > 1e-3


@pytest.mark.parametrize("name", ["sinusoidal", "rope"])
def test_the_scheme_decides_the_scale_of_embeddings_and_not_of_logits(name):
    abstract = nnx.eval_shape(lambda: new_model(make(name)))
    assert {block.attention.settings.scale for block in abstract.blocks} == {None}
    assert abstract.embed_scale == (4.0 if name == "sinusoidal" else 1.0)


def test_a_model_without_causality_sees_all_but_what_it_predicts():
    sizes = dataclasses.replace(SIZES, is_causal=False)
    network = new_model(make("rope"), sizes)
    tokens = np.random.default_rng(0).integers(1, TASK.vocab_size, (1, 9)).repeat(3, 0)
    tokens[1, 8] = 7  # A later token that is seen.
    tokens[2, 4] = 7  # One that is masked.
    mask = np.zeros((3, 9))
    mask[:, 4] = 1
    inputs, targets = network.inputs_and_targets(tokens, mask)
    np.testing.assert_array_equal(targets, tokens[:, 1:])
    assert (np.asarray(inputs)[:, 3] == 0).all() and (np.asarray(inputs)[:, :3] != 0).all()
    out = np.asarray(jax.jit(network)(inputs))
    assert np.abs(out[0, 3] - out[1, 3]).max() > 1e-5
    np.testing.assert_array_equal(out[0], out[2])


@slow
def test_convolutions_reach_earlier_tokens_only():
    sizes = dataclasses.replace(SIZES, conv_size=3)
    block = new_model(make("none"), sizes).blocks[0]
    x = np.random.default_rng(0).normal(size=(1, 10, 16)).astype(np.float32)
    kernels = [np.asarray(conv.kernel[...]) for conv in block.convs]
    assert all(np.abs(kernel).max() <= 3**-0.5 for kernel in kernels)

    def mixed(y, kernel):
        padded = jnp.pad(y, ((0, 0), (2, 0), (0, 0)))
        return y + sum(kernel[i] * padded[:, i : i + 10] for i in range(3))

    @jax.jit
    def run(x):
        after = x + block.attention(mixed(block.norm1(x), kernels[0]))
        inner = mixed(block.norm2(after), kernels[1])
        return block(x), after + block.down(jax.nn.gelu(block.up(inner)))

    np.testing.assert_allclose(*run(x), rtol=1e-5, atol=1e-5)


def test_the_model_encodes_the_coordinates_that_it_is_given():
    tokens = np.random.default_rng(0).integers(0, TASK.vocab_size, (2, 12))
    coordinates = np.arange(12)[None].repeat(2, 0)
    rope = jax.jit(model("rope"))
    plain = rope(tokens)
    np.testing.assert_array_equal(rope(tokens, coordinates), plain)
    np.testing.assert_allclose(rope(tokens, coordinates + 9), plain, atol=1e-5)
    assert np.abs(rope(tokens, 5 * coordinates) - plain).max() > 1e-4
    graphdef, params = nnx.split(new_model(make("learned")))
    learned = jax.jit(lambda params, *inputs: nnx.merge(graphdef, params)(*inputs))
    plain = learned(params, tokens, coordinates)
    table = params["positions"][0]["parameters"]["table"]
    table.set_value(np.roll(table.get_value(), 9, axis=0))
    np.testing.assert_allclose(learned(params, tokens, coordinates + 9), plain, atol=1e-6)


def test_training_equals_a_python_loop():
    scheme = make("rope")
    trained = train(TASK, scheme, 5, None)
    graphdef = structure(SIZES, scheme, TASK.vocab_size)
    params = initialize(SIZES, scheme, TASK.vocab_size, seed_key(5, "parameters"))
    optimizer = make_optimizer(TASK.train, TASK.train.learning_rate, TASK.train.scheme_rate, 4)
    moments = optimizer.init(params)
    key = seed_key(5, "data")

    @jax.jit
    def step(number, params, moments):
        tokens, mask = TASK.sample(jax.random.fold_in(key, number), 4, 32)

        def loss(params):
            each = token_losses(graphdef, params, tokens)
            return (each * mask[:, 1:]).sum() / mask[:, 1:].sum()

        value, gradient = jax.value_and_grad(loss)(params)
        change, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, change), moments, value

    losses = []
    for number in range(4):
        params, moments, value = step(number, params, moments)
        losses.append(float(value))
    assert trained.curve["step"] == [2, 4]
    np.testing.assert_allclose(trained.curve["loss"], np.reshape(losses, (2, 2)).mean(1), atol=1e-4)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(trained.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@slow
def test_the_learning_rate_of_a_scheme():
    scheme = make("fox")
    params = initialize(SIZES, scheme, TASK.vocab_size, seed_key(0, "parameters"))

    @jax.jit
    def change(scheme_rate):
        gradient = jax.tree.map(jnp.ones_like, params)
        optimizer = make_optimizer(TASK.train, 1e-3, scheme_rate, 4)
        _, state = optimizer.update(gradient, optimizer.init(params), params)  # From zero.
        return optimizer.update(gradient, state, params)[0]

    ratios = jax.tree.map(lambda a, b: float((np.array(a) / b).mean()), change(10.0), change(1.0))
    for path, ratio in jax.tree_util.tree_leaves_with_path(ratios):
        expected = 10.0 if "encoding" in jax.tree_util.keystr(path) else 1.0
        assert ratio == pytest.approx(expected, rel=1e-4)


@slow
def test_activations_in_bfloat16():
    """Attention and the head have bfloat16 inputs; parameters, logits and gradients are float32."""
    sizes, scheme = dataclasses.replace(SIZES, dtype="bfloat16"), make("fox")
    tokens = jnp.arange(2 * 9).reshape(2, 9) % TASK.vocab_size
    losses = []
    for each in (SIZES, sizes):
        params = initialize(each, scheme, TASK.vocab_size, seed_key(0, "parameters"))
        graphdef = structure(each, scheme, TASK.vocab_size)
        loss = functools.partial(mean_loss, graphdef=graphdef, tokens=tokens, mask=tokens * 0 + 1.0)
        losses.append(float(jax.jit(loss)(params)))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(losses[1], losses[0], rtol=4e-3)
    gradient = jax.eval_shape(jax.grad(loss), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    text = str(jax.make_jaxpr(loss)(params))
    products = re.findall(r"(\w+)\[[^\]]*\] = dot_general", text)
    assert "bf16" in products and f"f32[2,8,{TASK.vocab_size}]" in text


@pytest.mark.parametrize("warmup", [0, 3])
def test_the_learning_rate_warms_up_and_decays(warmup):
    """Equals Optax's schedule, with a number of steps that is traced."""
    train = dataclasses.replace(TASK.train, warmup=warmup, clip=1e9, weight_decay=0.0)
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup, 9, train.final_rate)

    @jax.jit
    def changes(steps):
        optimizer = make_optimizer(train, 1e-2, 1.0, steps)

        def step(state, _):
            change, state = optimizer.update(jnp.float32(1.0), state, jnp.float32(0.0))
            return state, change

        return jax.lax.scan(step, optimizer.init(jnp.float32(0.0)), length=9)[1]

    expected = [-1e-2 * float(shape(n)) for n in range(9)]
    np.testing.assert_allclose(changes(jnp.float32(9)), expected, rtol=1e-5)


def test_training_ends_once_the_loss_is_not_finite():
    wild = dataclasses.replace(TASK, train=dataclasses.replace(TASK.train, learning_rate=1e38))
    trained = train(wild, make("rope"), 5, None)  # The program of the loop above.
    assert trained.curve["step"] == [2, 4] and trained.diverged == 4


def test_text_evaluation_equals_a_loop_over_bytes():
    task = Text(
        train_length=8,
        test_lengths=(8, 16),
        sliding_lengths=(4, 8, 16),
        eval_bytes=32,
        stride=4,
        ngram=2,
        model=SIZES,
    )
    held_out = np.random.default_rng(0).integers(0, 8, 300).astype(np.uint8)
    data = Data(held_out=(held_out, np.zeros(0, np.uint8)))
    scheme = make("rope", task)
    params = initialize(SIZES, scheme, 256, seed_key(0, "parameters"))
    params = jax.tree.map(lambda x: 5 * x, params)  # Large enough for positions to matter.
    evaluations = task.evaluate(scheme, params, 0, data)
    assert evaluations[0].in_distribution
    assert {(e.mode, e.variant) for e in evaluations if e.length == 4} == {
        (mode, None) for mode in ("sliding", "repeated", "new", "copied_4_8")
    }
    starts = task.block_starts(held_out)
    graphdef = structure(SIZES, scheme, 256)

    @jax.jit
    def logp_of(params, tokens):
        return jax.nn.log_softmax(nnx.merge(graphdef, params)(tokens[None])[0])

    for e in [e for e in evaluations if e.variant is None]:
        bits, again, back = [], [], []
        for start in starts:
            step = e.length if e.mode == "nonoverlapping" else task.stride
            for end in range(start + step, start + 16 + 1, step):
                window = held_out[end - e.length : end + 1].astype(np.int32)
                padded = np.pad(window[:-1], (0, 16 - e.length))
                logp = np.asarray(logp_of(params, padded))
                logp = logp[np.arange(e.length), window[1:]]
                bits += list(-logp[e.length - step :])
                pairs = [tuple(window[i - 1 : i + 1]) for i in range(1, e.length + 1)]
                again += [pairs[i] in pairs[:i] for i in range(e.length - step, e.length)]
                for at in range(end - step + 1, end + 1):  # In windows of 16 that end at `end`.
                    pair, first = tuple(held_out[at - 1 : at + 1]), end - 16 + 1
                    uses = [i for i in range(first, at) if tuple(held_out[i - 1 : i + 1]) == pair]
                    back.append(at - uses[-1] if uses else 0)
        assert len(bits) == 32 and 0 < sum(again) < 32
        scored = {"repeated": np.array(again), "new": ~np.array(again)}.get(e.mode, slice(None))
        if e.mode.startswith("copied"):
            a, b = map(int, e.mode.split("_")[1:])
            scored = (np.array(back) > a) & (np.array(back) <= b)
            assert 0 < sum(scored) < 32 and e.length >= a
        assert e.value == pytest.approx(np.array(bits)[scored].mean() / np.log(2), abs=2e-4)
        if e.mode == "nonoverlapping":
            by_place = np.reshape(bits, (-1, step)).mean(0) / np.log(2)
            assert e.places[e.length :] == [None] * (16 - e.length)
            np.testing.assert_allclose(e.places[: e.length], by_place, atol=2e-4)
        else:
            assert e.places is None
    modes = {"nonoverlapping", "sliding", "repeated", "new", "copied_4_8", "copied_8_16"}
    assert {e.mode for e in evaluations} == modes
    for mode in task.views[: -len(task.variants)]:
        lengths = {e.length for e in evaluations if (e.mode, e.variant) == (mode, None)}
        assert lengths == {*task.lengths_of(mode)}
    changed = {(e.variant, e.length): e.value for e in evaluations if e.mode == "nonoverlapping"}
    assert changed["ntk", 16] != changed[None, 16] != changed["pi", 16]
    assert ("ntk", 8) not in changed
    data = Data(baseline=3.36)
    assert task.fits(3.05, data) and not task.fits(3.07, data)
    assert task.fit_rule(data).endswith("<= 3.060, 0.3 below a table of byte pairs")


@pytest.mark.parametrize(
    ("variant", "first", "last"),
    [
        pytest.param("window_7", 0, 7, marks=slow),
        pytest.param("window", 0, 12, marks=slow),
        ("sinks", 4, 8),
    ],
)
def test_a_window_is_a_shorter_text(variant, first, last):
    """One layer: the loss at the end is that of a text of the visible tokens alone."""
    params = initialize(SIZES, ROPE, 256, seed_key(0, "parameters"))
    params = jax.tree.map(lambda x: 4 * x, params)
    tokens = jax.random.randint(jax.random.key(1), (1, 32), 0, 256)
    visible = jnp.concatenate([tokens[:, :first], tokens[:, -last - 1 :]], axis=1)

    def loss(position, tokens):
        graphdef = structure(SIZES, position, 256)
        return float(jax.jit(functools.partial(token_losses, graphdef))(params, tokens)[0, -1])

    changed = loss(varied(ROPE, variant, 12, 31), tokens)
    assert changed == pytest.approx(loss(ROPE, visible), abs=1e-5)
    assert abs(changed - loss(ROPE, tokens)) > 1e-3


def test_other_variants_keep_layers_that_they_do_not_know():
    local = pe.LayerSpec(ROPE, window=3)
    layers = local, pe.LayerSpec(ROPE), pe.LayerSpec(pe.NoPE())
    windows = varied(layers, "window", 12, 48)
    assert windows == (local, pe.LayerSpec(ROPE, window=(11, 0)), layers[2])
    yarn = pe.RoPE(head_dim=8, scaling=pe.YaRN(4.0, 12))
    changed = varied(layers, "yarn", 12, 48)
    assert changed == (pe.LayerSpec(yarn, window=3), pe.LayerSpec(yarn), layers[2])
    assert varied(ROPE, "yarn", 12, 12) is varied(yarn, "window", 12, 48) is None
    (rerope,) = varied(pe.RoPE(head_dim=8, theta=500.0), "rerope", 12, 12)
    assert rerope == pe.LayerSpec(pe.ReRoPE(head_dim=8, theta=500.0, window=3))


@slow
def test_scores_by_place_equal_a_loop_over_tokens():
    task = Copy(train_length=14, test_lengths=(14, 36), model=SIZES, eval_batch=8, eval_batches=1)
    scheme = make("rope", task)
    params = initialize(task.model, scheme, task.vocab_size, seed_key(0, "parameters"))
    evaluations = [e for e in task.evaluate(scheme, params, 0, Data()) if e.mode == "plain"]
    key = jax.random.fold_in(seed_key(0, "test"), 0)
    sample = jax.jit(lambda key: task.sample_test(key, task.eval_batch))
    tokens, mask, index = map(np.asarray, sample(key))
    network = nnx.merge(structure(task.model, scheme, task.vocab_size), params)
    guesses = np.asarray(jax.jit(network)(tokens[:, :-1])).argmax(-1)
    right = {e.length: [[] for _ in range(16)] for e in evaluations}
    for row, place in zip(*np.nonzero(mask), strict=True):
        length = task.test_lengths[index[row, place]]
        right[length][(place - 1) * 16 // length].append(
            guesses[row, place - 1] == tokens[row, place]
        )
    for e in evaluations:
        assert e.places == [round(np.mean(x), 5) if x else None for x in right[e.length]]
        assert {x is None for x in e.places} == {True, False} or e.length == task.train_length
