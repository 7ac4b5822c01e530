"""Errors name the argument, what was wanted and the value.

The errors are declared in the test files: `ERRORS` at their top level has entries (what is called,
its arguments by name, what the message says) of calls that raise `ValueError`, or the type that is
the fourth of an entry. Schemes are built by `support.build`, and their messages begin with their
names, unless the entry has another word before a colon.

Sizes below one, tokens of other sizes than a scheme's, unknown words, and numbers that are negative
or NaN are tested for all schemes.
"""

import dataclasses

import jax
import numpy as np
import pytest

import posenc_jax as pe
from tests.support import KV_HEADS, SIZES, build, declared, make_batch, parameters

NAMES = {cls: name for name, cls in pe.SCHEMES.items()}
CASES = [
    pytest.param(*entry, id=f"{path.stem.removeprefix('test_')}-{n}")
    for path, entries in declared("ERRORS")
    for n, entry in enumerate((*e, ValueError)[:4] for e in entries)
]
SIZE_FIELDS = [
    (kind, field.name)
    for kind, cls in pe.SCHEMES.items()
    for field in dataclasses.fields(cls)
    if field.name in SIZES and field.default is dataclasses.MISSING
]
ANY_SIZE = {("tupe", "head_dim"), ("tupe", "model_dim"), ("deberta", "model_dim")}
ANY_SIZE |= {("transformer_xl", "model_dim")}
"""Sizes of parameters alone, which tokens need not have."""


ANY_NUMBER = {"seed", "stddev", "init_std", "initial_shape", "gain"}
"""Settings of initialisation: NaN is in the parameters, for all to see."""
WRONG = {str: "nothing", int: -1, float: float("nan")}
SETTINGS = [
    (kind, field.name, WRONG[type(field.default)])
    for kind, cls in pe.SCHEMES.items()
    for field in dataclasses.fields(cls)
    if type(field.default) in WRONG and field.name not in ANY_NUMBER
]


@pytest.mark.parametrize(("call", "arguments", "message", "error"), CASES)
def test_error(call, arguments, message, error):
    name = NAMES.get(call)
    if name and ": " not in message:
        message = f"^{name}: .*{message}"
    with pytest.raises(error, match=message):
        build(call, **arguments) if name else call(**arguments)


@pytest.mark.parametrize(("kind", "field"), SIZE_FIELDS)
def test_sizes_below_one_are_refused(kind, field):
    with pytest.raises(ValueError, match=f"^{kind}: {field} must be .*, got 0"):
        build(pe.SCHEMES[kind], **{field: 0})


@pytest.mark.parametrize(("kind", "field", "value"), SETTINGS)
def test_settings_refuse_unknown_words_and_numbers(kind, field, value):
    with pytest.raises(ValueError, match=rf"^\w+: .*\b{field}\b.*{value}"):
        build(pe.SCHEMES[kind], **{field: value})


@pytest.mark.parametrize(
    ("kind", "field"), [case for case in SIZE_FIELDS if "length" not in case[1]]
)
def test_tokens_of_another_size_are_refused(kind, field):
    if (kind, field) in ANY_SIZE:
        return
    scheme, tokens = build(pe.SCHEMES[kind]), make_batch(1, 5)
    if field == "model_dim":
        tokens = dataclasses.replace(tokens, x=np.zeros((1, 5, 11), np.float32))
    else:
        q = np.zeros((1, 5, 6, 11) if field == "head_dim" else (1, 5, 11, 8), np.float32)
        k = q[:, :, :KV_HEADS] if field == "head_dim" else q
        tokens = dataclasses.replace(tokens, q=q, k=k, v=k)

    def attend(params, tokens):
        x = pe.scheme_embedding(scheme, params, tokens.x)
        arrays = tokens.q, tokens.k, tokens.v
        return pe.scheme_attention(scheme, params, *arrays, x=x, is_causal=True)

    with pytest.raises((TypeError, ValueError), match=r"\b11\b"):
        jax.eval_shape(attend, parameters(scheme), tokens)
