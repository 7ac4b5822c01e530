"""Attention weights of trained models, against a softmax in numpy."""

import jax
import numpy as np
import pytest
from flax import nnx

import posenc_jax as pe
from experiments.commands.attention import attention_weights, biases, by_distance
from experiments.models.model import LanguageModel
from experiments.scoreboard.speed import Speed, SpeedRun
from experiments.settings.common import Model

SIZES = Model(model_dim=16, num_layers=2, num_heads=2)
LENGTH = 10


@pytest.fixture(scope="module")
def measured():
    model = LanguageModel(SIZES, pe.ALiBi(2), 17, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 17, (2, LENGTH))
    # `attention_weights` replaces parts of the model: it must get it as an argument.
    run = nnx.jit(lambda model, tokens: attention_weights(model, tokens))
    return model, tokens, run(model, tokens)


def test_weights_are_those_of_a_softmax(measured):
    model, tokens, by_layer = measured

    @jax.jit
    def inputs_of_layers(tokens):
        x, inputs = model.embed(tokens), []
        for block in model.blocks:
            inputs.append(block.norm1(x))
            x = block(x)
        return inputs

    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    slopes = np.asarray(pe.alibi_slopes(2), np.float64)
    for block, y, weights in zip(model.blocks, inputs_of_layers(tokens), by_layer, strict=True):
        layer, y = block.attention, np.asarray(y, np.float64)
        q, k = (
            np.einsum("btd,dnh->btnh", y, np.asarray(p.kernel[...]))
            for p in (layer.query, layer.key)
        )
        logits = np.einsum("btnh,bsnh->btns", q, k) / 8**0.5 - slopes[:, None] * distance[:, None]
        logits = np.where(distance[:, None] >= 0, logits, -np.inf)
        e = np.exp(logits - logits.max(-1, keepdims=True))
        np.testing.assert_allclose(weights, e / e.sum(-1, keepdims=True), atol=1e-5)


def test_means_by_distance(measured):
    model, tokens, by_layer = measured
    half = LENGTH // 2
    for got, weights in zip(by_distance(model, tokens), np.asarray(by_layer), strict=True):
        expected = [
            [weights[:, t, n, t - d].mean() for d in range(half)]
            for n in range(2)
            for t in range(half, LENGTH)
        ]
        expected = np.reshape(expected, (2, half, half)).mean(1)
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_biases_of_alibi_are_its_slopes(measured):
    expected = -np.asarray(pe.alibi_slopes(2))[:, None] * np.arange(5)
    np.testing.assert_allclose(biases(measured[0], 5), [expected, expected], atol=1e-5)


def test_speed_measures_the_step_of_a_length():
    sizes = Model(model_dim=16, num_layers=1, num_heads=2)
    task = Speed(train_length=8, test_lengths=(16,), model=sizes, tokens=16, rounds=2)
    run = SpeedRun(task, "alibi", {}, pe.ALiBi(2), 0)
    scores = run.measure(None, task.load())["scores"]["plain"]
    assert scores.keys() == {"16"} and all(0 < x < 100 for x in scores.values())
