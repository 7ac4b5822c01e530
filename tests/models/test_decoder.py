"""Calls of `Decoder` that return less, and caches of layers with a window."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import decoder, families
from examples.half_precision import dot_general
from posenc_jax.testing import jit_fast
from tests.models.agreement import load, read
from tests.support import slow

ROWS, LENGTH, CHUNK, WINDOW = 2, 23, 4, 7
TOKENS = np.random.RandomState(0).randint(1, 44, (ROWS, LENGTH), np.int32)


@functools.cache
def gemma():
    """Gemma 2, with a softcap, and a window in every other layer; its logits, and parts of them."""
    model = load("gemma2")
    assert [block.attention.window for block in model.blocks] == [WINDOW, None]

    def run():
        hidden = model(TOKENS, hidden=True)
        return model(TOKENS), (model(TOKENS, last=3), hidden, model.logits(hidden[:, 5:9]))

    return model, *jax.device_get(jit_fast(run)())


@slow
def test_logits_of_the_last_tokens_and_of_hidden_states():
    model, logits, (last, hidden, some) = gemma()
    assert hidden.shape == (ROWS, LENGTH, model.config.model_dim)
    np.testing.assert_allclose(last, logits[:, -3:], atol=1e-5)
    np.testing.assert_allclose(some, logits[:, 5:9], atol=1e-5)
    for last in (0, LENGTH + 1):
        with pytest.raises(ValueError, match=f"last must be from 1 to T = {LENGTH}, got {last}"):
            jax.eval_shape(functools.partial(model, last=last), TOKENS)


@slow
def test_chunks_and_steps_with_rings_equal_one_pass_and_generation(monkeypatch):
    model, logits, _ = gemma()
    caches, start = model.new_caches(ROWS, 64, tokens_per_call=CHUNK), 0
    assert [(c.capacity, c.ring) for c in caches] == [(WINDOW - 1 + CHUNK, True), (64, False)]
    traces, logits_of = [], decoder.Decoder.logits
    monkeypatch.setattr(
        decoder.Decoder, "logits", lambda *arrays: traces.append(0) or logits_of(*arrays)
    )
    step, new = decoder.jit_step(model), []
    for count in [CHUNK] * 4 + [1] * (LENGTH - 4 * CHUNK):
        part, caches = step(TOKENS[:, start : start + count], caches)
        start += count
        np.testing.assert_allclose(part, logits[:, start - 1], atol=1e-5)
    for _ in range(6):
        new.append(np.argmax(part, -1)[:, None])
        part, caches = step(new[-1], caches)
    assert len(traces) == 2  # One for chunks and one for steps.
    run = jit_fast(decoder.generate, static_argnums=(0, 2), static_argnames="top_k")
    options = {"key": jax.random.key(0), "temperature": 0.7, "top_k": 1}  # The likeliest token.
    np.testing.assert_array_equal(run(model, TOKENS, 6, **options), np.concatenate(new, 1))
    drawn = {"key": jax.random.key(0), "steps": 1}
    right = {"steps": 1, "mask": np.arange(LENGTH) < [[LENGTH - 1], [LENGTH]]}
    zero = drawn | {"temperature": jnp.float32(0)}
    wrongs = {"steps": 0}, {"steps": 1, "top_k": 1}, drawn | {"top_k": 0}, zero, right
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"at least 1, got 0|need key|positive, got 0.0|left"):
            decoder.generate(model, TOKENS, **wrong)
    with pytest.raises(
        ValueError, match="5 tokens at a time with window 7 need a ring of 11 slots"
    ):
        jax.eval_shape(model, TOKENS[:, :5], caches)


@pytest.mark.parametrize(
    "size, axis, others", [(50, 0, (3, 7)), (48, 0, (1031,)), (63, 0, (5,)), (50, 1, (1031,))]
)
def test_products_of_one_token_with_halves_equal_those_in_float64(size, axis, others):
    """Sizes with and without a factor of 8."""
    draws = np.random.RandomState(0)
    x, w = draws.standard_normal((1, 1, size)), draws.standard_normal((size, *others))
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in (x, w if axis == 0 else w.T))
    axes = (((2,), (axis,)), ((), ()))
    run = jit_fast(lambda *xw: dot_general(*xw, axes, preferred_element_type=jnp.float32))
    out = run(x, w)
    exact = np.asarray(w, np.float64)
    exact = np.tensordot(np.asarray(x, np.float64), exact, ((2,), (axis,)))
    assert out.shape == exact.shape and out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact, atol=1e-4)
    assert "optimization_barrier" in run.lower(x, w).as_text()
    two = jnp.concatenate([x, x], 1)
    assert dot_general(two, w, axes).dtype == jnp.bfloat16


def test_all_projections_have_the_dot_general_of_the_config():
    about, _, state = read("gemma2")
    shapes = []

    def product(x, w, *numbers, **options):
        shapes.append(w.shape)
        return jax.lax.dot_general(x, w, *numbers, **options)

    model = families.load(about["config"], state, dot_general=product)
    jax.eval_shape(lambda: model(TOKENS))
    assert len(shapes) == 2 * (4 + 3) + 1  # Attention and MLP of two layers, and the logits.


def test_learned_positions_of_padded_and_packed_rows_are_those_of_rows_alone():
    model, length = load("gpt2"), 7
    ids = np.repeat([[-1, 0], [0, 1]], (3, length), axis=1)
    tokens = TOKENS[:, : ids.shape[1]]
    out, alone, first = jit_fast(
        lambda: (model(tokens, segment_ids=ids), model(tokens[:, 3:]), model(tokens[1:, :3]))
    )()
    np.testing.assert_allclose(out[:, 3:], alone, atol=1e-5)
    np.testing.assert_allclose(out[1:, :3], first, atol=1e-5)


def test_more_tokens_than_a_table_of_positions_holds_are_refused():
    with pytest.raises(ValueError, match="max_length of 128 holds"):
        decoder.generate(load("gpt2"), TOKENS, 128)


def test_other_products_of_one_token_with_halves_are_those_of_jax():
    """Axes in another order or between others, and weights on a mesh."""
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.normal(size=(n, 4, 6)), jnp.bfloat16) for n in (1, 4))
    for axes in [((1,), (1,)), ((1, 2), (1, 2)), ((2, 1), (2, 1)), ((1, 2), (0, 2))]:
        y = x if len(axes[0]) == 2 else x[:, :, 0]
        numbers = (axes, ((), ()))
        out, expected = (f(y, w, numbers) for f in (dot_general, jax.lax.dot_general))
        np.testing.assert_allclose(*(a.astype(jnp.float32) for a in (out, expected)), atol=0.05)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec(None, None, "x")
    with jax.set_mesh(mesh):
        sharded = jax.device_put(w, jax.sharding.NamedSharding(mesh, spec))
        out = jax.jit(lambda *xw: dot_general(*xw, (((1,), (0,)), ((), ()))))(x[:, :, 0], sharded)
        assert out.sharding.spec == spec
