"""Further tests of the arrays of pages: equal before and after a change, right if not printed.

`setup` has the names that a page expects of its reader. A function of CHECKS gets all names that
the blocks of its page define.
"""

import pathlib
import re
import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import posenc_jax as pe
from tests.models.agreement import read

WEIGHTS = "query", "key", "value", "out"


def setup(page):
    """Returns the names that a page uses without defining them."""
    if page == "docs/checkpoints.md":
        from tests.models import gguf_files, test_checkpoints

        path = pathlib.Path(tempfile.mkdtemp()) / "model.gguf"
        files = test_checkpoints.small()
        gguf_files.write(path, *files, tokenizer=test_checkpoints.BYTES)
        return {"path": path}
    if page not in ("docs/models.md", "docs/beyond.md", "docs/recipes/finetune.md"):
        return {}
    about, arrays, state = read("qwen3" if page == "docs/beyond.md" else "llama3")
    batch = {name: jnp.asarray(arrays[name]) for name in ("tokens", "mask", "new")}
    batch |= {"batches": [arrays["new"][:, :33]] * 20, "folder": f"{tempfile.mkdtemp()}/new"}
    return {"config": about["config"], "state": state} | batch


def close(a, b, atol=1e-5):
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def lm1b(names):
    apply, before, after = names["apply"], names["Before"], names["After"]
    variables, tokens = names["variables"], names["tokens"]
    ids = np.repeat([[0, 1, 2]], [3, 7, 2], 1).repeat(3, 0).astype(np.int32)
    packed = variables, tokens, pe.positions.from_segment_ids(ids), ids
    expected = apply(before(), *packed)[0]
    close(apply(names["sinusoidal"], *packed)[0], expected)
    assert np.abs(apply(names["rotary"], *packed)[0] - expected).max() > 0.1
    both = before(decode=True), after(names["sinusoidal"].scheme, decode=True)
    close(*(names["decode"](model, variables, tokens[:, :3]) for model in both))
    shapes = jax.eval_shape(names["learned"].init, jax.random.key(0), tokens)
    (table,) = jax.tree.leaves(shapes["params"]["AttentionFn_0"])  # Of both layers.
    assert table.shape == (4, 32)


def gemma(names):
    x, window, length = names["x"], names["WINDOW"], 12
    positions = jnp.tile(jnp.arange(length), (3, 1))
    mask = jnp.tril(jnp.ones((3, length, length), bool))
    attend = nnx.jit(lambda layer, *arguments: layer(*arguments))
    for layer, settings in (("local", (1e4, 1.0, window)), ("whole", (1e6, 8.0, None))):
        before = names["Before"](*settings, rngs=nnx.Rngs(2))
        before.query_norm.scale[...] = jnp.linspace(-0.5, 0.5, 8)
        before.key_norm.scale[...] = jnp.linspace(0.5, -0.5, 8)
        expected = attend(before, x, positions, mask)[0]
        close(attend(names["with_weights"](before, names[layer]), x), expected)


def bonsai_qwen3(names):
    close(names["y"], names["expected"])


def linen_decode(names):
    tokens, before, after = names["sequences"], names["Before"](), names["After"](pe.NoPE())
    variables = jax.jit(before.init)(jax.random.key(1), tokens)
    close(*(jax.jit(model.apply)(variables, tokens) for model in (before, after)))


def sharding(names):
    close(names["decoded"], names["y"])
    x = names["x"]
    with jax.set_mesh(names["mesh"]):
        before = names["on_mesh"](names["Before"])
        after = names["on_mesh"](lambda rngs: names["after"](pe.RoPE(head_dim=4), rngs))
        kernels = ([getattr(m, n).kernel for n in WEIGHTS] for m in (before, after))
        for a, b in zip(*kernels, strict=True):
            assert a.get_value().sharding.spec == b.get_value().sharding.spec
            b[...] = a[...]
        compiled = [
            jax.jit(lambda layer, x: layer(x)).lower(m, x).compile() for m in (before, after)
        ]
        close(compiled[0](before, x), compiled[1](after, x))
    collectives = (
        sorted(re.findall(r" (all-\w+|collective-\w+)\(", c.as_text())) for c in compiled
    )
    by_hand, ours = collectives
    assert ours == by_hand and by_hand


def nnx_llama(names):
    assert names["losses"][0] > 4 and names["losses"][-1] < 0.4 * names["losses"][0]
    model, segments = names["model"], np.asarray(names["segment_ids"])
    take = nnx.jit(lambda blocks: jax.tree.map(lambda x: x[1], blocks.attention))
    attention, before = take(model.blocks), names["Before"](rngs=nnx.Rngs(0))
    for name in WEIGHTS:
        getattr(before, name).kernel[...] = getattr(attention, name).kernel[...]
    x = np.random.RandomState(0).standard_normal((2, 24, 48)).astype(np.float32)
    is_token = segments >= 0
    mask = np.tril((segments[:, :, None] == segments[:, None]) & is_token[:, None])[:, None]
    attend = nnx.jit(lambda layer, x, *arguments, **tokens: layer(x, *arguments, **tokens))
    positions = pe.positions.from_segment_ids(segments)
    expected = attend(before, x, positions, mask)[0]
    close(attend(attention, x, **names["options"])[is_token], expected[is_token])


def plain_jax_and_equinox(names):
    x, weights = names["x"], names["weights"] | {"position": {}}
    after = jax.jit(lambda weights, x: names["after"](pe.RoPE(head_dim=8), weights, x)[0])
    close(after(weights, x), jax.jit(names["before"])(weights, x))
    if "eqx" not in names:
        return
    eqx = names["eqx"]
    before = names["Before"](jax.random.key(0))
    layer = eqx.tree_at(lambda layer: layer.attention, names["layer"], before.attention)
    close(layer(x)[0], jax.vmap(before)(x))


def flex_attention(names):
    q, k, v, table = (np.asarray(names[n], np.float64) for n in ("q", "k", "v", "table"))
    distance = np.clip(np.arange(24)[:, None] - np.arange(24), -16, 16)
    s = np.einsum("btnh,bsnh->bnts", q, k) / 4.0 + table[:, distance + 16]
    s -= np.asarray(names["slopes"])[:, None, None] * np.abs(distance)
    w = np.exp(s) * np.tri(24)
    expected = np.einsum("bnts,bsnh->btnh", w / w.sum(-1, keepdims=True), v)
    close(names["y"], expected)
    assert all(np.abs(gradient).max() > 0.01 for gradient in names["gradients"])
    if "torch" in names:
        arrays = [names["torch"].tensor(np.asarray(names[n])).transpose(1, 2) for n in "qkv"]
        with warnings.catch_warnings(action="ignore"):  # Slow without torch.compile.
            close(names["y"], names["before"](*arrays).transpose(1, 2).numpy())


def bias_array(names):
    inputs = [names[name] for name in ("q", "k", "v", "bias")]
    expected, pull = jax.vjp(jax.jit(names["before"]), *inputs)
    close(names["y"], expected)
    for got, gradient in zip(names["gradients"], pull(jnp.cos(names["y"])), strict=True):
        close(got, gradient)
    rules = names["rule"], names["same"]
    close(*(jax.jit(pe.attention)(*inputs[:3], rules=rule) for rule in rules))


def nnx_rope(names):
    if "before" in names:  # Flax has nnx.RoPE.
        close(names["before"](names["x"], is_causal=True), names["y"])
        close(names["same"], names["packed"])
        q = jax.random.normal(jax.random.key(1), (1, 8, 4, 8))
        rotated = jax.vmap(names["rope"], -2, -2)(q)
        close(rotated, pe.apply_rope(q, jnp.arange(8), theta=5e5))


def coming_from_torch(names):
    if "torch" not in names:
        return
    torch, before, x = names["torch"], names["Before"](), names["x"]
    linear = {f"{n}.weight": torch.tensor(np.asarray(w)) for n, w in names["linear"].items()}
    before.load_state_dict(linear)
    with torch.no_grad():
        close(names["y"], before(torch.tensor(np.asarray(x))))


def finetune(names):
    tokens = jnp.asarray(names["batches"][0])
    before = names["families"].load(names["config"], names["state"])
    losses = [names["finetune"].evaluate(names[n], tokens) for n in ("model", "loaded")]
    assert losses[0] == losses[1] < names["finetune"].evaluate(before, tokens) - 1.0


def beyond(names):
    about, arrays, state = read("llama_yarn")
    config, tokens, mask = about["config"], arrays["tokens"], arrays["mask"]
    plain = config | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    model = names["families"].load(plain, state)
    names["change"](model, pe.from_hf(config)[0].scheme)
    positions, segment_ids = pe.positions.from_padding_mask(jnp.asarray(mask))
    logits = model(jnp.asarray(tokens), positions=positions, segment_ids=segment_ids)
    close(logits[mask], arrays["logits"][:, : tokens.shape[1]][mask], 1e-4)
    (cache, *_) = names["model"].new_caches(1, 10**6, tokens_per_call=9)
    assert cache.k.shape[1] == names["L"] - 4 + 3 + 9


def serving(names):
    assert names["step"].jitted_fn._cache_size() == 1
    close(names["y"][0], names["layer"](names["x"])[0])


def models(names):
    np.testing.assert_array_equal(names["new_tokens"], names["new"])
    assert [x.out.bias for x in names["layers"]] == [None, None]
    assert names["layers"][0].key.bias.shape == (2, 16)


CHECKS = {
    "docs/recipes/flax_lm1b.md": lm1b,
    "docs/recipes/flax_gemma.md": gemma,
    "docs/recipes/bonsai_qwen3.md": bonsai_qwen3,
    "docs/recipes/linen_decode.md": linen_decode,
    "docs/recipes/sharding.md": sharding,
    "docs/recipes/nnx_llama.md": nnx_llama,
    "docs/recipes/jax_and_equinox.md": plain_jax_and_equinox,
    "docs/recipes/flex_attention.md": flex_attention,
    "docs/recipes/bias_array.md": bias_array,
    "docs/coming_from/nnx_rope.md": nnx_rope,
    "docs/coming_from/torch.md": coming_from_torch,
    "docs/recipes/finetune.md": finetune,
    "docs/beyond.md": beyond,
    "docs/serving.md": serving,
    "docs/models.md": models,
}
