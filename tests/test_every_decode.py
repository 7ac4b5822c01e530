"""What every scheme keeps when it decodes: caches, padding, rings. Schemes are the exports."""

import jax.numpy as jnp
import numpy as np
from support import BATCH, LENGTH, close, decode, empty_cache, output, programs

from posenc_jax import positions as at


def test_prompt_then_steps_equal_the_whole(scheme, params, tokens):
    """The prompt in tiles, in chunks of any size."""
    prompt, cache = decode(
        scheme, params, tokens[:, :18], [12, 6], empty_cache(scheme), implementation="xla"
    )
    last, _ = decode(scheme, params, tokens[:, 18:], [1], cache)
    close(jnp.concatenate([prompt, last], 1), output(scheme, params, tokens))


def test_steps_from_nothing_trace_once(scheme, params, tokens):
    first, cache = decode(scheme, params, tokens[:, :1], [1], empty_cache(scheme))
    before = programs()
    rest, _ = decode(scheme, params, tokens[:, 1:], [1] * (LENGTH - 1), cache)
    assert programs() == before
    close(jnp.concatenate([first, rest], 1), output(scheme, params, tokens))


def test_rows_padded_on_the_left_equal_rows_alone(scheme, params, tokens):
    mask = jnp.arange(LENGTH)[None] >= jnp.array([[0], [6]])
    positions, segments = at.from_padding_mask(mask)
    where = {"positions": positions, "segment_ids": segments}
    whole = output(scheme, params, tokens, **where)
    chunked, _ = decode(scheme, params, tokens, [12, 6, 1], empty_cache(scheme), **where)
    assert np.all(np.asarray(whole)[1, :6] == 0)
    alone = output(scheme, params, tokens[1:, 6:])
    for out in (whole, chunked):
        close(out[0], output(scheme, params, tokens)[0])
        close(out[1, 6:], alone[0])


def test_decoding_goes_on_after_left_padding(scheme, params, tokens):
    mask = jnp.arange(12)[None] >= jnp.array([[0], [7]])
    positions, segments = at.from_padding_mask(mask)
    where = {"positions": positions, "segment_ids": segments}
    _, cache = decode(scheme, params, tokens[:, :12], [12], empty_cache(scheme), **where)
    out, _ = decode(scheme, params, tokens[:, 12:13], [1], cache)  # Positions 12 and 5.
    for row, pad in enumerate([0, 7]):
        alone = output(scheme, params, tokens[row : row + 1, pad:13])
        close(out[row, 0], alone[0, -1])


def test_right_padded_prompts_decode_as_rows_alone(scheme, params, tokens):
    lengths = np.array([12, 5])
    positions, segments = at.from_padding_mask(jnp.arange(12)[None] < lengths[:, None])
    where = {"positions": positions, "segment_ids": segments}
    _, cache = decode(scheme, params, tokens[:, :12], [12], empty_cache(scheme), **where)
    out, _ = decode(scheme, params, tokens[:, 12:13], [1], cache)
    for row, n in enumerate(lengths):
        alone = make_row(tokens, row, [*range(n), 12])
        close(out[row, 0], output(scheme, params, alone)[0, -1])


def make_row(tokens, row, slots):
    return tokens.map(lambda a: a[row : row + 1, np.array(slots)])


def test_ring_buffer_of_a_window(scheme, params, tokens):
    window, chunks = 4, [3] * 3 + [1] * 4 + [3] * 2
    cache = empty_cache(scheme, capacity=window - 1 + max(chunks), ring=True)
    out, _ = decode(scheme, params, tokens, chunks, cache, window=window)
    close(out, output(scheme, params, tokens, window=window))


def test_coordinates_travel_with_the_cache(scheme, params, tokens):
    coordinates = 3 * at.count_up(BATCH, LENGTH)
    cache = empty_cache(scheme, coordinates=coordinates)
    chunks = [12] + [1] * (LENGTH - 12)
    out, _ = decode(scheme, params, tokens, chunks, cache, coordinates=coordinates)
    close(out, output(scheme, params, tokens, coordinates=coordinates))
