"""What every scheme keeps when it decodes: caches, padding, rings. Schemes are the exports."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import BATCH, LENGTH, close, compiled, decode, empty_cache, forward, output

from posenc_jax import positions as at


@pytest.mark.parametrize(
    "chunks", [[LENGTH - 4, 1, 1, 1, 1], [7, 5, 6, 1], [1] * LENGTH], ids=["steps", "chunks", "all"]
)
def test_prompt_then_steps_equal_the_whole(scheme, params, tokens, chunks):
    out, _ = decode(scheme, params, tokens, chunks, empty_cache(scheme))
    close(out, output(scheme, params, tokens))


def test_decode_traces_once(scheme, params, tokens):
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, tokens, cache):
        return forward(scheme, params, tokens, cache=cache)

    cache = empty_cache(scheme)
    outs = []
    for t in range(6):
        out, cache = step(params, tokens[:, t : t + 1], cache)
        outs.append(out)
    close(jnp.concatenate(outs, 1), output(scheme, params, tokens[:, :6]))


def test_rows_padded_on_the_left_equal_rows_alone(scheme, params, tokens):
    pads = jnp.array([0, 6])
    mask = jnp.arange(LENGTH)[None] >= pads[:, None]
    positions, segments = at.from_padding_mask(mask)
    where = {"positions": positions, "segment_ids": segments}
    whole = output(scheme, params, tokens, **where)
    chunked, _ = decode(scheme, params, tokens, [10, 5, 4], empty_cache(scheme), **where)
    for row, pad in enumerate([0, 6]):
        alone = output(scheme, params, tokens[row : row + 1, pad:])
        close(whole[row, pad:], alone[0])
        close(chunked[row, pad:], alone[0])
    assert np.all(np.asarray(whole)[1, :6] == 0)


def test_decoding_goes_on_after_left_padding(scheme, params, tokens):
    positions, segments = at.from_padding_mask(jnp.arange(12)[None] >= jnp.array([[0], [4]]))
    _, cache = compiled(
        scheme,
        params,
        tokens[:, :12],
        cache=empty_cache(scheme),
        positions=positions,
        segment_ids=segments,
    )
    out, _ = compiled(scheme, params, tokens[:, 12:13], cache=cache)  # Positions 12 and 8.
    for row, pad in enumerate([0, 4]):
        alone = output(scheme, params, tokens[row : row + 1, pad:13])
        close(out[row, 0], alone[0, -1])


def test_right_padded_prompts_decode_as_rows_alone(scheme, params, tokens):
    lengths = np.array([9, 6])
    mask = jnp.arange(9)[None] < lengths[:, None]
    positions, segments = at.from_padding_mask(mask)
    _, cache = compiled(
        scheme,
        params,
        tokens[:, :9],
        cache=empty_cache(scheme),
        positions=positions,
        segment_ids=segments,
    )
    out, _ = compiled(scheme, params, tokens[:, 9:10], cache=cache)
    for row, n in enumerate(lengths):
        alone = make_row(tokens, row, [*range(n), 9])
        close(out[row, 0], output(scheme, params, alone)[0, -1])


def make_row(tokens, row, slots):
    return tokens.map(lambda a: a[row : row + 1, np.array(slots)])


@pytest.mark.parametrize("chunk", [1, 3])
def test_ring_buffer_of_a_window(scheme, params, tokens, chunk):
    window = 4
    cache = empty_cache(scheme, capacity=window - 1 + chunk, ring=True)
    chunks = [chunk] * (18 // chunk)
    out, _ = decode(scheme, params, tokens[:, :18], chunks, cache, window=window)
    close(out, output(scheme, params, tokens[:, :18], window=window))


def test_coordinates_travel_with_the_cache(scheme, params, tokens):
    coordinates = 3 * at.count_up(BATCH, LENGTH)
    cache = empty_cache(scheme, coordinates=coordinates)
    outs = []
    for part in (slice(0, 12), slice(12, 18), slice(18, 19)):
        out, cache = compiled(
            scheme, params, tokens[:, part], cache=cache, coordinates=coordinates[:, part]
        )
        outs.append(out)
    whole = output(scheme, params, tokens, coordinates=coordinates)
    close(jnp.concatenate(outs, 1), whole)
