"""Tokens outside the vocabulary: errors where they are known, and no token of it under `jit`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc_jax as pe
from examples import decoder, encoders, qwen2_vl, t5
from posenc_jax.testing import jit_fast
from tests.models.agreement import IMAGE, VOCABULARY, images, load, prompts
from tests.support import slow, slow_but

STEPS = 4
SAMPLED = {"temperature": 0.7, "top_k": 5}


def small(scheme):
    config = decoder.ModelConfig((pe.LayerSpec(scheme),), VOCABULARY, 16, 2, 2, 8, 16)
    return decoder.Decoder(config, rngs=nnx.Rngs(0))


def case(name):
    """The caller in messages, a function of tokens and mask, and both for it."""
    tokens, mask, patches, grids = images() if name == "qwen2_vl" else (*prompts(), None, None)
    options = SAMPLED | {"key": jax.random.key(0)} if name == "sampled" else {}
    model = small(pe.RoPE(8)) if name in ("greedy", "sampled") else load(name)

    def generate(tokens, mask):
        return decoder.generate(model, tokens, STEPS, mask=mask, **options)

    caller, run = {
        "bert": ("Encoder", lambda *x: encoders.embed(model, *x)),
        "deberta_v2": ("DeBERTa", lambda *x: model(*x)[:, -1]),
        "t5": ("T5", lambda *x: t5.greedy(model, *x, STEPS)[0]),
        "qwen2_vl": (
            "Decoder",
            lambda *x: qwen2_vl.generate(model, x[0], STEPS, x[1], patches, grids),
        ),
    }.get(name, ("Decoder", generate))
    return caller, run, tokens.astype(np.int32), mask


@pytest.mark.parametrize(
    "name",
    slow_but(("greedy", "sampled", "qwen2_vl", "t5", "bert", "deepseek_v3", "deberta_v2"), "bert"),
)
def test_tokens_outside_the_vocabulary(name):
    """One row has one; padding may be any number; other rows are as without it."""
    caller, run, tokens, mask = case(name)
    assert not mask[-1, 0]
    jitted = jit_fast(run)
    right = np.asarray(jitted(tokens, mask))
    for bad, pad in ((VOCABULARY, -1), (-1, VOCABULARY), (VOCABULARY + 9, 2**31 - 1)):
        padded = np.where(mask, tokens, np.int32(pad))
        np.testing.assert_array_equal(jitted(padded, mask), right)
        wrong = padded.copy()
        wrong[-1, -2] = bad
        with pytest.raises(
            ValueError, match=rf"^{caller}: tokens must be in \[0, 44\), the vocabulary, got {bad}"
        ):
            run(wrong, mask)
        out = np.asarray(jitted(wrong, mask))
        np.testing.assert_array_equal(out[:-1], right[:-1])
        floats = np.issubdtype(out.dtype, np.floating)
        assert (np.isnan(out[-1]) if floats else out[-1] == -1).all()


def test_the_choice_from_logits_that_are_nan():
    logits = np.random.RandomState(0).standard_normal((4, 11)).astype(np.float32)
    logits[1], logits[2, 3] = np.nan, np.nan
    logits[3, :5] = -np.inf
    for key in (None, jax.random.key(1)):
        for choose in (decoder.choose_tokens, jax.jit(decoder.choose_tokens)):
            tokens = choose(jnp.asarray(logits), key)
            expected = choose(jnp.asarray(np.nan_to_num(logits, nan=0.0)), key)
            np.testing.assert_array_equal(tokens, [expected[0], -1, -1, expected[3]])
            assert expected[0] >= 0 and expected[3] >= 5
    assert decoder.choose_tokens(jnp.asarray(logits))[0] == logits[0].argmax()


@slow
def test_segment_ids_below_zero_are_padding():
    """In calls that are not compiled, too, and without NaN in gradients."""
    model, tokens = small(pe.RoPE(8)), jnp.array([[1, 2, 3]] * 2)
    ids = jnp.array([[0, 0, 1], [-1, -1, 0]])
    padded = jnp.where(ids < 0, -1, tokens)
    x = model.embed(padded, ids)
    np.testing.assert_array_equal(x[0], model.embed(tokens)[0])
    with pytest.raises(ValueError, match=r"segment_ids must be \[B, T\] = \(2, 3\), got \(1, 3\)"):
        model(tokens, segment_ids=ids[:1])

    def loss(model):
        return jnp.where(ids < 0, 0.0, model(padded, segment_ids=ids)[..., 0]).sum()

    gradients = nnx.jit(nnx.grad(loss))(model)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize("dtype", ["uint8", "int32"])
def test_a_vocabulary_larger_than_the_type_of_tokens_or_of_one(dtype):
    tokens = jnp.array([[0, 1, 127]], dtype)
    for size in (1, 1000):
        table = nnx.Embed(size, 4, rngs=nnx.Rngs(0))
        embed = jax.jit(functools.partial(decoder.embed_tokens, "f", table))
        assert jnp.isnan(embed(tokens)).all(-1).tolist() == [[False, size == 1, size == 1]]


@slow
def test_positions_beyond_a_table_under_jit():
    """One row has 5 tokens and 6 new ones, and the table holds 8."""
    model = small(pe.LearnedAbsolute(max_length=8, model_dim=16))
    tokens = prompts()[0][:2, -5:].astype(np.int32)
    run = jit_fast(lambda tokens, mask: decoder.generate(model, tokens, 6, mask=mask))
    mask = np.arange(5) >= [[0], [3]]
    long, short = (np.asarray(run(tokens, x)) for x in (mask, mask[[1, 1]]))
    assert (long[0] == -1).tolist() == [False] * 4 + [True] * 2
    assert (short >= 0).all()
    np.testing.assert_array_equal(long[1], short[1])


@slow
def test_prompts_and_temperatures_that_cannot_be_refused_under_jit():
    """One row is padded on the right; with a temperature of 0 all rows end."""
    model = small(pe.RoPE(head_dim=8))
    tokens = prompts()[0][:2, -5:].astype(np.int32)

    @jit_fast
    def run(mask, temperature):
        sample = {"key": jax.random.key(0), "temperature": temperature}
        return [decoder.generate(model, tokens, 2, mask=mask, **x) for x in ({}, sample)]

    greedy, cold = run(np.arange(5) < [[5], [3]], 1e-6)
    assert (greedy[0] >= 0).all() and greedy[1].tolist() == [-1, -1]
    np.testing.assert_array_equal(cold, greedy)
    for temperature in (0.0, -1.0, np.nan):
        assert run(np.ones((2, 5), bool), temperature)[1].tolist() == [[-1, -1]] * 2


@slow
def test_images_need_no_token_of_the_vocabulary(monkeypatch):
    model = load("qwen2_vl", image_token_id=99)
    tokens, mask, patches, grids = images()
    is_image = tokens == IMAGE
    shape = is_image.sum(), model.language.config.model_dim
    monkeypatch.setattr(qwen2_vl.VisionTower, "__call__", lambda *_: jnp.full(shape, 7.0))
    monkeypatch.setattr(pe, "mrope_coordinates", lambda *_, **__: (None, None))
    tokens = jnp.asarray(np.where(is_image, 99, tokens))
    x = model.inputs(tokens, jnp.asarray(mask), patches, grids)["inputs"]
    assert (x[is_image] == 7.0).all() and jnp.isfinite(x).all()
    assert model.inputs(tokens, jnp.asarray(mask), patches[:0], [()] * len(tokens)) == {}


@slow
def test_other_numbers_that_are_looked_up():
    """Token types of BERT, and tokens of the decoder of T5."""
    tokens, mask = (x[-1:] for x in prompts())
    model = load("bert")
    with pytest.raises(ValueError, match=r"^Encoder: types must be in \[0, 2\), .*, got 2"):
        model(tokens, mask, np.where(mask, 2, -1))
    with pytest.raises(ValueError, match=r"^Encoder: the model has no types of tokens"):
        load("mpnet")(tokens, mask, 0)
    model = load("t5")
    with pytest.raises(ValueError, match=r"^T5: tokens must be in \[0, 44\), .*, got -1"):
        model(tokens * 0 - 1, None)
    with pytest.raises(ValueError, match=r"^greedy: start must be in \[0, 44\), .*, got 44"):
        t5.greedy(model, tokens, mask, 1, start=44)
