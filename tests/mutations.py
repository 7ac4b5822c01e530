"""Faults that the tests must find: python tests/mutations.py [NAME ...] [--list] [--jobs 2].

Each mutation is one small wrong change of the package: a wrong sign, an off-by-one in a bound, a
dropped mask, a wrong layout, a lost gradient, a stale cache row. It is applied to a copy of the
working tree, and the tests named beside it run there until the first failure: a mutation is caught
if one fails. With --all the whole suite runs where they pass. The exit status is 1 if a mutation
survives. CONTRIBUTING.md says when to run it.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Mutation:
    """Replaces `old` by `new`, once, in a file of the package."""

    name: str
    path: str
    old: str
    new: str
    tests: str


XLA = "tests/engine/test_every_implementation.py tests/engine/test_xla.py"
SERVING = "tests/cache"
SUITE = "tests/test_every_scheme.py"

# fmt: off
MUTATIONS = [
    # Functions of rules.
    Mutation("the backward pass of tiles traces rules again", "engine/terms.py",
             "return dataclasses.replace(self, rule=rule, shared=(captured, self.shared))",
             "return self",
             "tests/engine/test_functions.py"),
    Mutation("the backward pass of tiles traces transforms again", "engine/terms.py",
             "if self.transform is None:", "if True:",
             "tests/engine/test_functions.py"),
    Mutation("the backward pass of tiles traces buckets again", "engine/terms.py",
             "            return self\n        bucket, captured",
             "            pass\n        return self\n        bucket, captured",
             "tests/engine/test_functions.py"),
    Mutation("derivatives of a decode step trace rules again", "engine/dense.py",
             "return attend(captured, p.without", "return _attend_row(p.without",
             "tests/engine/test_functions.py"),
    Mutation("derivatives of the decode kernel trace rules again", "kernels/tpu/implementation.py",
             "traced[1](captured[1], p)", "Dense()(p)",
             "tests/engine/test_functions.py"),
    Mutation("the backward pass of a ring traces rules again", "sharding.py",
             "            out, lse = attend(captured, problem)",
             "            out, lse = run(problem)",
             "tests/engine/test_functions.py"),
    Mutation("captured arrays have no gradient", "engine/terms.py",
             "[next(arrays) if", "[jax.lax.stop_gradient(next(arrays)) if",
             "tests/engine/test_functions.py"),
    Mutation("kernels take functions that close over arrays", "kernels/elements.py",
             "if rule.closed.consts:", "if False:",
             "tests/engine/test_functions.py"),
    Mutation("check does not name a function made anew", "testing/properties.py",
             "for name, function in itertools.chain(*after):", "for name, function in ():",
             "tests/test_testing.py"),
    Mutation("one list of LongRoPE serves all lengths", "schemes/rotary/scaling/longrope.py",
             "            self.long is not None,", "            True,",
             "tests/schemes/rotary/scaling/test_longrope.py"),
    # Traits.
    Mutation("symmetric ALiBi tells past from future", "schemes/bias/alibi.py",
             'mirrored = self.symmetry == "symmetric" and', "mirrored = False and",
             f"{SUITE}::test_property[alibi-tells_past_from_future]"),
    # Positions.
    Mutation("a document of one token joins the next", "positions/packing.py",
             "restarts = positions <= jnp", "restarts = positions < jnp",
             "tests/positions/test_packing.py"),
    Mutation("antialiased grids have the sharp kernel", "positions/image_grids.py",
             "    if antialias:", "    if False:",
             "tests/positions/test_image_grids.py"),
    Mutation("an exported cache forgets settings", "cache/serialization.py",
             "for f in dataclasses.fields(x) if f.init}", "for f in ()}",
             "tests/functional/test_export.py"),
    # Chips whose kernels are right.
    Mutation("kernels are the default on all chips", "engine/chips.py",
             "chip[:3] == device and dtype", "chip[1:3] == device[1:] and dtype",
             "tests/kernels/test_chips.py"),
    Mutation("kernels are the default with any jax and CUDA", "engine/chips.py",
             "chip[:3] == device and dtype", "chip[0] == device[0] and dtype",
             "tests/kernels/test_chips.py"),
    Mutation("kernels are the default for dtypes that no step had", "engine/chips.py",
             "dtype in chip.dtypes", "dtype",
             "tests/kernels/test_chips.py"),
    Mutation("decode steps take kernels", "engine/api.py",
             "if problem.length >= 128 and chips", "if chips",
             "tests/kernels/test_chips.py"),
    Mutation("programs cannot do without kernels", "engine/chips.py",
             "if _by_default.value is not None", "if _by_default.value",
             "tests/kernels/test_chips.py"),
    Mutation("a chip gets a row without all families of steps", "kernels/__main__.py",
             "if wrong or not", "if wrong and not",
             "tests/kernels/test_chips.py"),
    Mutation("processes that are lost are not counted", "kernels/checks/runner.py",
             'ahead, losses = ["--ahead"], losses + 1', 'ahead, losses = ["--ahead"], losses',
             "tests/kernels/test_runner.py"),
    # Rings.
    Mutation("a prefill is not checked in a ring", "cache/kv_cache.py",
             "if self.ring and not other.ring:", "if False:",
             "tests/cache/test_kv_cache.py"),
    Mutation("rings turn keys at one position", "cache/kv_cache.py",
             "lost |= tied & _reads_order(self.scheme)", "pass",
             "tests/cache/test_kv_cache.py"),
    Mutation("scaled masks are rounded in one pass", "engine/terms.py",
             "return differentiable_in_units(out, self.factor)\n\n    def dropped",
             "return self.factor * out\n\n    def dropped",
             "tests/engine/test_masks_by_numbers.py"),
    Mutation("a ring forgets that tokens share a position", "cache/storage.py",
             "jnp.where(tied, reached, overwritten)", "overwritten",
             "tests/cache/test_kv_cache.py"),
    Mutation("a ring looks at the last slot that was overwritten", "cache/storage.py",
             "jnp.maximum(first, 0)", "jnp.maximum(first + 1, 0)",
             "tests/cache/test_kv_cache.py"),
    # Masks and problems.
    Mutation("causal hides the query's own token", "engine/mask.py",
             "seen &= j <= i", "seen &= j < i",
             "tests/engine/test_mask.py"),
    Mutation("window one token too wide", "engine/mask.py",
             "side = min(int(window) - 1, _FAR)", "side = min(int(window), _FAR)",
             "tests/engine/test_mask.py"),
    Mutation("padding of keys is visible", "engine/mask.py",
             "seen &= (k_segment_ids >= 0)[:, None, :]",
             "seen &= (k_segment_ids >= -1)[:, None, :]",
             f"tests/engine/test_mask.py {XLA} {SUITE}"),
    Mutation("prefix one key too long", "engine/mask.py",
             "seen |= j < prefix_length[:, None, None]",
             "seen |= j <= prefix_length[:, None, None]",
             f"tests/engine/test_mask.py {XLA}"),
    Mutation("positions near the greatest int32 wrap around", "engine/mask.py",
             "return numpy.minimum(x, limits.max - number) + number", "return x + number",
             "tests/engine/test_mask.py tests/engine/test_robustness.py"),
    Mutation("sorted keys: segments before positions", "engine/problem.py",
             "jnp.lexsort(sort_keys, axis=-1)", "jnp.lexsort(sort_keys[::-1], axis=-1)",
             f"tests/schemes/content/test_path.py tests/engine/test_dense.py {SUITE}"),
    Mutation("dropout keeps what it drops", "engine/dropout.py",
             "_mix(rows + k_slots) >= jnp.uint32", "_mix(rows + k_slots) < jnp.uint32",
             "tests/engine/test_implementations.py"),
    # Dense.
    Mutation("bands of a window lose one key", "engine/dense.py",
             "low = 0 if left_side < 0 else max(0, start - left_side)",
             "low = 0 if left_side < 0 else max(0, start - left_side + 1)",
             "tests/engine/test_dense.py"),
    Mutation("sinks do not change weights", "engine/problem.py",
             "total += jnp.exp(sinks - top)", "total += 0.0 * jnp.exp(sinks - top)",
             "tests/engine/test_every_implementation.py tests/engine/test_dense.py"),
    Mutation("decode: values of unseen keys with NaN spoil the row", "engine/dense.py",
             "    finite = jnp.isfinite(out).all()\n", "    return out, lse\n",
             "tests/engine/test_dense.py"),
    Mutation("decode: keys in any order are taken for consecutive ones", "engine/rules.py",
             "in_order = small & jnp.all(consecutive | unused)", "in_order = small",
             "tests/engine/test_one_query.py"),
    Mutation("decode: keys without room get the vector of far ones", "engine/rules.py",
             "fit = jnp.all(jnp.sum(near, axis=1) <= room)", "fit = jnp.all(near | ~near)",
             "tests/engine/test_one_query.py"),
    Mutation("softcap without its division", "engine/dense.py",
             "x = p.softcap * jnp.tanh(x / p.softcap)", "x = p.softcap * jnp.tanh(x)",
             "tests/engine/test_every_implementation.py tests/engine/test_dense.py"),
    # Tiles in XLA.
    Mutation("heads with one number stay in bfloat16", "engine/xla.py",
             "if 1 in (p.q.shape[3], p.v.shape[3]):", "if False:",
             "tests/engine/test_xla.py"),
    Mutation("running sum forgets its decay", "engine/xla.py",
             "l = l * decay + p.sum(3)", "l = l + p.sum(3)",
             XLA),
    Mutation("backward: delta of the softmax has the wrong sign of d_lse", "engine/problem.py",
             "delta = factor * (delta - d_lse)", "delta = factor * (delta + d_lse)",
             XLA),
    Mutation("backward: the digits that the log-sum-exp lacks are lost", "engine/problem.py",
             "factor = jnp.exp((rounded - lse.top - log_total) / unit)",
             "factor = jnp.exp(0.0 * rounded)",
             "tests/engine/test_masks_by_numbers.py"),
    Mutation("-inf of an array of all pairs hides no NaN", "engine/problem.py",
             "seen if rule.pairs is None else seen & ~jnp.isneginf(rule.pairs)", "seen",
             "tests/engine/test_masks_by_numbers.py"),
    Mutation("tiles: -inf of an array of all pairs hides no NaN", "engine/xla.py",
             "finite = ~jnp.isneginf(term.pairs)", "finite = term.pairs < jnp.inf",
             "tests/engine/test_masks_by_numbers.py"),
    Mutation("kernels: -inf of an array of all pairs hides no NaN", "kernels/base.py",
             "return seen | finite", "return jnp.ones_like(seen)",
             "tests/engine/test_masks_by_numbers.py"),
    Mutation("kernels: the least logit overflows in units of log 2", "engine/mask.py",
             "jnp.maximum(unit * x, LEAST_LOGIT)", "unit * x",
             "tests/engine/test_masks_by_numbers.py"),
    Mutation("ring: shares without the sums of exponentials", "sharding.py",
             "share = part_lse.total * jnp.exp(part_lse.top - lse.top) / total",
             "share = jnp.exp(part_lse.top - lse.top)",
             "tests/engine/test_masks_by_numbers.py"),
    Mutation("backward: gradient of the softcap is lost", "engine/xla.py",
             "ds = ds if softcap_grad is None else ds * softcap_grad", "ds = ds",
             XLA),
    Mutation("backward: dropout of dp is lost", "engine/xla.py",
             "dp = dp if dropout is None else dp * dropout", "dp = dp",
             f"{XLA} tests/engine tests/functional"),
    Mutation("grouped heads: gradients of one query head only", "engine/xla.py",
             "return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]).sum(2)",
             "return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])[:, :, 0]",
             XLA),
    Mutation("strips start one distance late", "engine/xla.py",
             "- j * self.blocks.k - (self.blocks.k - 1)", "- j * self.blocks.k - self.blocks.k",
             XLA),
    Mutation("mask: the first block of keys serves all", "engine/xla.py",
             "mask = take_block(mask, 3, j, self.blocks.k)",
             "mask = take_block(mask, 3, 0 * j, self.blocks.k)",
             XLA),
    Mutation("NaN of unseen values enters the sum", "engine/xla.py",
             "v = zero_keys(live, v)\n    keys = keys", "keys = keys",
             "tests/engine/test_robustness.py"),
    Mutation("blind queries: zero in place of -inf as log-sum-exp", "engine/problem.py",
             "return jnp.where(blind, -jnp.inf, self.top", "return jnp.where(blind, 0.0, self.top",
             f"{XLA} tests/engine/test_robustness.py"),
    Mutation("tile skipped that holds the window's last key", "engine/blocks.py",
             "live = live & (late.low <= add_saturated(early.high, limit))",
             "live = live & (late.low < add_saturated(early.high, limit))",
             XLA),
    Mutation("interior tile that a segment boundary crosses", "engine/blocks.py",
             "full = full & (a.low == b.high) & (b.low == a.high) & (a.low == a.high)",
             "full = full & (a.low == b.high)",
             XLA),
    Mutation("horizon one distance too near", "engine/blocks.py",
             "full = full & (q_low > add_saturated(k_high, self.horizon - 1))",
             "full = full & (q_low > add_saturated(k_high, self.horizon - 2))",
             XLA),
    Mutation("the range of a block ends at its least number", "engine/blocks.py",
             "return cls(low.min(-1), high.max(-1))", "return cls(low.min(-1), high.min(-1))",
             XLA),
    # Terms, rules and their lowering.
    Mutation("gradient of open ends of a table is lost", "engine/terms.py",
             "out += jnp.where(entries == entry, total, 0.0)",
             "out += 0.0 * jnp.where(entries == entry, total, 0.0)",
             XLA),
    Mutation("diagonal sums on CPU shifted by one row", "engine/toeplitz.py",
             "start = rows - 1 - r\n", "start = jnp.maximum(rows - 2 - r, 0)\n",
             f"{XLA} tests/schemes/bias/test_t5.py"),
    Mutation("parts of a strip's product start one distance late", "engine/terms.py",
             "near = vectors[:, start : start", "near = vectors[:, start + 1 : start + 1",
             f"{XLA} tests/schemes/content"),
    Mutation("gradient of a strip's vectors is that of one token less", "engine/terms.py",
             'jnp.einsum("qf,qr->fr", tokens, products,',
             'jnp.einsum("qf,qr->fr", tokens[1:], products[1:],',
             XLA),
    Mutation("dv is computed without dropout", "engine/xla.py",
             "do_t, dropped.astype(v.dtype)", "do_t, p.astype(v.dtype)",
             f"{XLA} tests/engine tests/functional"),
    Mutation("a bias for cuDNN is rounded as it is", "engine/jax_nn.py",
             "values -= jax.lax.stop_gradient(values.max(1, keepdims=True))", "pass",
             "tests/engine/test_jax_nn.py"),
    Mutation("a bias for cuDNN has one head where heads share it", "engine/jax_nn.py",
             "jnp.broadcast_to(values, (p.num_heads, values.shape[1]))", "values",
             "tests/engine/test_jax_nn.py"),
    Mutation("dropped constant is not added back to the log-sum-exp", "engine/lower.py",
             "lse_shift=sum(dropped[1:], dropped[0]) if dropped else None", "lse_shift=None",
             XLA),
    Mutation("bias by distance: mask of a window drops its last key", "engine/lower.py",
             "seen = (distances <= left_side) | (left_side < 0)",
             "seen = (distances < left_side) | (left_side < 0)",
             XLA),
    Mutation("values of the table lack its far value", "engine/lower.py",
             ".astype(jnp.float32) + lowering.far_value[None, None]", ".astype(jnp.float32)",
             f"{XLA} tests/schemes/content/test_shaw.py"),
    Mutation("rule bounds: constant begins one distance early", "engine/rules.py",
             "end = stop if high is None else max(min(stop, high + 1), start + 1)",
             "end = stop if high is None else max(min(stop, high), start + 1)",
             f"{XLA} tests/schemes/bias/test_t5.py tests/schemes/content"),
    Mutation("dot bias of one query reads the wrong distance", "engine/rules.py",
             "entry = distances.entries(q_at, k_at, transposed=False)",
             "entry = distances.entries(k_at, q_at, transposed=True)",
             "tests/engine/test_every_implementation.py tests/schemes/content/test_shaw.py"),
    Mutation("symmetric separable bias keeps its sign", "engine/rules.py",
             "return -jnp.abs(out) if self.symmetric else out", "return out",
             "tests/schemes/content/test_fox.py tests/engine"),
    # Kernels.
    Mutation("TPU: blocks that only the window's last key reaches have no step",
             "kernels/tpu/schedule.py",
             "live &= q - (k + blocks.k - 1) <= before",
             "live &= q - (k + blocks.k - 1) < before - 1",
             "tests/kernels/test_tpu.py"),
    Mutation("TPU: the cotangent of a bias is of the last head or row alone",
             "kernels/tpu/backward_pairs.py",
             "    @pl.when((g == 0) & (r == 0))", "    @pl.when(r == 0)",
             "tests/kernels/test_tpu.py"),
    Mutation("TPU: tiles of a bias are not transposed backward", "kernels/tpu/backward.py",
             "jnp.swapaxes(term.pairs[...], 0, 1)", "term.pairs[...]",
             "tests/engine/test_dense_bias.py"),
    Mutation("TPU: a strip is read one lane late", "kernels/tpu/strip.py",
             "before, after = first - strip.low, strip.low + strip.line - first - count",
             "before, after = first - strip.low - 1, strip.low + strip.line - first - count + 1",
             "tests/kernels/test_tpu.py"),
    Mutation("kernels: the cotangent of the log-sum-exp is lost", "kernels/base.py",
             "d_out, d_lse.top, LOG2E)", "d_out, 0 * d_lse.top, LOG2E)",
             "tests/kernels/test_tpu.py"),
    # Schemes.
    Mutation("RoPE rotates backwards", "schemes/rotary/rotate.py",
             "sin = -sin if negative else sin", "sin = sin if negative else -sin",
             "tests/schemes/rotary/test_rope.py"),
    Mutation("gradient of learned rotary tables has the wrong sign", "schemes/rotary/rotate.py",
             "sign * (gb * a - ga * b)", "sign * (ga * b - gb * a)",
             "tests/schemes/rotary/test_learned_rope.py tests/schemes/rotary/test_rotate.py"),
    Mutation("interleaved pairs swap their partners", "schemes/rotary/rotate.py",
             "return x[..., 0::2], x[..., 1::2]", "return x[..., 1::2], x[..., 0::2]",
             "tests/schemes/rotary/test_layouts.py tests/schemes/rotary"),
    Mutation("T5: logarithmic buckets begin one distance late", "schemes/bias/t5.py",
             "bucket += (n >= bound).astype(jnp.int32)", "bucket += (n > bound).astype(jnp.int32)",
             "tests/schemes/bias/test_t5.py"),
    Mutation("FIRE: threshold does not bound the length", "schemes/bias/fire.py",
             "length = jnp.maximum(q.astype(jnp.float32), threshold)",
             "length = q.astype(jnp.float32)",
             "tests/schemes/bias/test_fire.py"),
    Mutation("KERPLE: no gradient beyond its limits", "schemes/bias/kerple.py",
             "+ (x - jax.lax.stop_gradient(x))", "",
             "tests/schemes/bias/test_kerple.py"),
    Mutation("Shaw: clipped one distance late", "schemes/content/shaw.py",
             "bounds=(-clip, clip),\n                scaled=True",
             "bounds=(-clip + 1, clip - 1),\n                scaled=True",
             "tests/schemes/content/test_shaw.py"),
    Mutation("DeBERTa: position-to-content reads the table of keys", "schemes/content/deberta.py",
             'queries = self._vectors(params, "queries")',
             'queries = self._vectors(params, "keys")',
             "tests/schemes/content/test_deberta.py"),
    Mutation("FoX: a decode step forgets the sum before it", "schemes/content/fox.py",
             "sums += state[:, None]", "sums += 0 * state[:, None]",
             f"{SUITE}::test_property[fox-prompt_then_steps_equal_the_whole]"),
    Mutation("CoPE: gates of hidden keys count", "schemes/content/cope.py",
             "gates = jnp.where(seen, jax.nn.sigmoid(logits), 0.0)",
             "gates = jax.nn.sigmoid(logits)",
             "tests/schemes/content/test_cope.py"),
    Mutation("YaRN: the ramp is upside down", "schemes/rotary/scaling/yarn.py",
             "return keep * frequencies + (1 - keep) * frequencies / self.factor, g",
             "return (1 - keep) * frequencies + keep * frequencies / self.factor, g",
             "tests/schemes/rotary/scaling/test_yarn.py"),
    Mutation("xPos: keys have the origin of their own step", "schemes/rotary/xpos.py",
             "origin = origin.max(1, keepdims=True, initial=lowest)", "pass",
             "tests/schemes/rotary/test_xpos.py"),
    Mutation("sinusoidal: the last wavelength of tensor2tensor is that of the paper",
             "schemes/additive/sinusoidal.py",
             'last = max(pairs - 1, 1) if layout == "t2t" else dim / 2', "last = dim / 2",
             "tests/schemes/additive/test_sinusoidal.py"),
    Mutation("ALiBi: the slopes beyond a power of two are those of even places",
             "schemes/bias/alibi.py",
             "geometric(2 * power)[::2]", "geometric(2 * power)[1::2]",
             "tests/schemes/bias/test_alibi.py"),
    Mutation("ALiBi: the penalty of past keys forgets its offset", "schemes/bias/alibi.py",
             "past * (self.past_offset - distance)", "past * -distance",
             "tests/schemes/bias/test_alibi.py"),
    Mutation("Swin V2: offsets are divided by the size of the window", "schemes/bias/swin_v2.py",
             "8.0 * np.arange(1 - n, n) / (m - 1)", "8.0 * np.arange(1 - n, n) / m",
             "tests/schemes/bias/test_swin_v2.py"),
    Mutation("TUPE: the class token's logits are swapped", "schemes/bias/tupe.py",
             "k_table[:, 1:], cls_logits[:, 0], cls_logits[:, 1]",
             "k_table[:, 1:], cls_logits[:, 1], cls_logits[:, 0]",
             "tests/schemes/bias/test_tupe.py"),
    Mutation("CoPE: a position between two rows takes the upper one", "schemes/content/cope.py",
             "high * weight + low * (1.0 - weight)", "high * (1.0 - weight) + low * weight",
             "tests/schemes/content/test_cope.py"),
    Mutation("Inkling: the bank covers one distance more", "schemes/content/inkling.py",
             "(distance < self.extent)", "(distance <= self.extent)",
             "tests/schemes/content/test_inkling.py"),
    Mutation("GRAPE: the slope of the query is forgotten", "schemes/content/grape.py",
             "slope = sum(x for x in (q_feature, k_feature) if x is not None)",
             "slope = next(x for x in (k_feature, q_feature) if x is not None)",
             "tests/schemes/content/test_grape.py"),
    Mutation("Transformer-XL: wavelengths begin at the second", "schemes/content/transformer_xl.py",
             "np.arange(0, model_dim, 2)", "np.arange(2, model_dim + 2, 2)",
             "tests/schemes/content/test_transformer_xl.py"),
    Mutation("stick-breaking: the query's token loses what remains",
             "schemes/content/stick_breaking.py",
             "if self.attend_current else remainder\n", "if self.attend_current else weights\n",
             "tests/schemes/content/test_stick_breaking.py"),
    Mutation("temperature: Llama 4 counts from 0", "schemes/logit_scale/temperature.py",
             'int(form == "llama4")', "0",
             "tests/schemes/logit_scale/test_temperature.py"),
    Mutation("Llama 3: the ramp is not clipped", "schemes/rotary/scaling/llama3.py",
             "np.clip((rotations - self.low_freq_factor) / width, 0.0, 1.0)",
             "(rotations - self.low_freq_factor) / width",
             "tests/schemes/rotary/scaling/test_llama3.py"),
    Mutation("dynamic NTK: the factor of the trained length is not one",
             "schemes/rotary/scaling/dynamic_ntk.py",
             "NTK(self.factor * longer - (self.factor - 1))", "NTK(self.factor * longer)",
             "tests/schemes/rotary/scaling/test_dynamic_ntk.py"),
    Mutation("M-RoPE: rows and columns swap", "schemes/rotary/mrope.py",
             "[1] * row, [2] * column", "[2] * row, [1] * column",
             "tests/schemes/rotary/test_mrope.py"),
    Mutation("PoPE: the offset turns the other way", "schemes/rotary/pope.py",
             "cos * c + sin * s, sin * c - cos * s", "cos * c - sin * s, sin * c + cos * s",
             "tests/schemes/rotary/test_pope.py"),
    Mutation("ReRoPE: far distances leak from zero", "schemes/rotary/rerope.py",
             "offset = restart - self.leak * self.window", "offset = restart",
             "tests/schemes/rotary/test_rerope.py"),
    Mutation("DualChunk: the chunk before is not bounded", "schemes/rotary/dual_chunk.py",
             "jnp.minimum(inside + length, self.chunk), last", "inside + length, last",
             "tests/schemes/rotary/test_dual_chunk.py"),
    Mutation("VO-RoPE: outputs are turned on, not back", "schemes/rotary/vo_rope.py",
             "return self.rotate(out, (cos, -sin))", "return self.rotate(out, (cos, sin))",
             "tests/schemes/rotary/test_vo_rope.py"),
    Mutation("RePo: the gate has no nonlinearity", "schemes/rotary/repo.py",
             "jax.nn.silu(gate) * content", "gate * content",
             "tests/schemes/rotary/test_repo.py"),
    Mutation("axial RoPE: frequencies are dealt in blocks", "schemes/rotary/axial.py",
             "[0].reshape(-1, num_axes).T", "[0].reshape(num_axes, -1)",
             "tests/schemes/rotary/test_axial.py"),
    Mutation("RoPE-Mixed: the second half is not a quarter turn on", "schemes/rotary/rope_mixed.py",
             "np.repeat([0.0, np.pi / 2]", "np.repeat([0.0, np.pi]",
             "tests/schemes/rotary/test_rope_mixed.py"),
    Mutation("Sandwich: heads are counted from 0", "contrib/sandwich.py",
             "np.arange(1, self.num_heads + 1)", "np.maximum(np.arange(self.num_heads), 1)",
             "tests/contrib/test_sandwich.py"),
    Mutation("BAM: the location moves the other way", "contrib/bam.py",
             "(k - q).astype(jnp.float32) - location", "(k - q).astype(jnp.float32) + location",
             "tests/contrib/test_bam.py"),
    Mutation("RoPE++: imaginary heads turn the other way", "contrib/rope_pp.py",
             "(cos, sin), (sin, -cos)", "(cos, sin), (-sin, cos)",
             "tests/contrib/test_rope_pp.py"),
    Mutation("chain: rules of the first scheme only", "schemes/combinators/chain.py",
             "for s, p, q, k in self._each(params, q_features, k_features):",
             "for s, p, q, k in list(self._each(params, q_features, k_features))[:1]:",
             "tests/schemes/combinators/test_chain.py"),
    Mutation("streaming: a key is in both parts", "schemes/combinators/streaming.py",
             "q_positions=add_saturated(q_positions, -(past + 1))",
             "q_positions=add_saturated(q_positions, -past)",
             "tests/schemes/combinators/test_streaming.py"),
    # Positions.
    Mutation("left padding counts as a token", "positions/packing.py",
             "positions = start + jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)",
             "positions = start + jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32), 0)",
             "tests/positions/test_packing.py"),
    Mutation("angles beyond 2**24 lose a digit", "angles.py",
             "return p * high + _high_word(p, low) - borrow", "return p * high - borrow",
             "tests/test_angles.py"),
    Mutation("distances beyond int32 wrap", "engine/terms.py",
             "return jnp.clip(k, jnp.maximum(q, -1) - most, jnp.minimum(q, 0) + most)", "return k",
             "tests/engine/test_robustness.py"),
    Mutation("distances beyond int32 take another row of a table", "engine/terms.py",
             "return q - jnp.clip(k, low, high) - self.low",
             "return jnp.clip(q - k, self.low, self.high) - self.low",
             "tests/engine/test_robustness.py"),
    # Caches.
    Mutation("a reset row keeps its old keys visible", "cache/kv_cache.py",
             "segment_ids=cleared(self.segment_ids, -1),", "segment_ids=self.segment_ids,",
             SERVING),
    Mutation("rewind leaves the last token", "cache/kv_cache.py",
             "segment_ids = jnp.where(tokens < length[:, None], self.segment_ids, -1)",
             "segment_ids = jnp.where(tokens <= length[:, None], self.segment_ids, -1)",
             SERVING),
    Mutation("tiles: gates between equal positions have no absolute value", "engine/rules.py",
             "not (context.is_causal and context.contiguous)", "not context.is_causal",
             "tests/schemes/content/test_fox.py"),
    Mutation("next position repeats the last", "cache/kv_cache.py",
             "return jnp.where(tokens, add_saturated(positions, 1), least)",
             "return jnp.where(tokens, positions, least)",
             SERVING),
    Mutation("tokens beyond the capacity overwrite the last slot", "cache/kv_cache.py",
             "slots = jnp.where(tokens & (slots < self.capacity), slots, past_end)",
             "slots = jnp.where(tokens, jnp.minimum(slots, self.capacity - 1), past_end)",
             SERVING),
    Mutation("a ring wraps one slot late", "cache/storage.py",
             "sinks + (tokens - sinks) % (capacity - sinks))",
             "sinks + tokens % (capacity - sinks))",
             SERVING),
    Mutation("states before the last tokens are stale", "cache/past_states.py",
             "old = states_without(state, past, removed - count[:, None])", "old = past",
             SERVING),
    Mutation("the second token of a write of one is kept", "cache/slots.py",
             "jnp.full_like(slots, old.shape[batch + 1])", "slots + 1",
             SERVING),
    Mutation("a ring reads the last token after it is overwritten", "cache/kv_cache.py",
             "before = self if count == self.capacity - sinks else new", "before = new",
             SERVING),
    Mutation("an inserted row keeps values that overflow", "cache/kv_cache.py",
             "dataclasses.replace(other, k=k, v=v,", "dataclasses.replace(other,",
             SERVING),
    # Functions and modules.
    Mutation("squares of long vectors overflow", "qk_norm.py",
             "jnp.where(exponent > 20, jnp.minimum(exponent, 120), 0)", "0 * exponent",
             "tests/test_qk_norm.py"),
    Mutation("the norm of keys is lost", "functional/pipeline.py",
             "return k if self.norms is None else self.norms[1](k)", "return k",
             "tests/functional tests/test_qk_norm.py"),
    Mutation("an overflowed row does not become NaN", "functional/attention.py",
             "return jnp.where(overflowed, jnp.nan, out).astype(out.dtype), cache",
             "return out, cache",
             f"tests/functional {SERVING}"),
    Mutation("the scheme's own logit scale is ignored", "functional/pipeline.py",
             "scale = self.scheme.logit_scale(head_dim)", "scale = None",
             "tests/functional tests/schemes/content/test_deberta.py"),
    Mutation("padding of a scheme's inputs is not zeroed", "functional/pipeline.py",
             "x, q, k, v = zero_padding((tokens.x, tokens.q, tokens.k, tokens.v), ids)",
             "x, q, k, v = tokens.x, tokens.q, tokens.k, tokens.v",
             f"tests/functional {SUITE} {SERVING}"),
    Mutation("a scheme replaces the scale of Flax's layer", "modules/attention_fn.py",
             "scale=query.shape[-1] ** -0.5 if scale is None else scale",
             "scale=pipeline.scale(query.shape[-1])",
             "tests/modules/test_attention_fn.py"),
    Mutation("another encoding changes the scale of a layer", "modules/shared.py",
             "before == after,", "True,",
             "tests/modules/test_flax.py"),
    Mutation("a scheme for causal attention sees later keys", "modules/shared.py",
             "if not is_causal and (sides is None or sides[1] != 0):", "if False:",
             "tests/modules/test_flax.py"),
    Mutation("a layer's softcap is not handed on", "modules/shared.py",
             'softcap=spec.softcap,', 'softcap=None,',
             "tests/modules"),
    Mutation("a layer in chunks shows the chunk before", "schemes/layer_spec.py",
             "positions // chunk_size % 16", "positions // chunk_size % 1",
             "tests/schemes/test_layer_spec.py"),
    Mutation("ring attention: gradients of keys stay one device behind", "sharding.py",
             'd_problem.with_tokens("k", _onwards(d_keys, axis_name))',
             'd_problem.with_tokens("k", d_keys)',
             "tests/test_sharding.py"),
    Mutation("zigzag deals pieces in order", "sharding.py",
             "pieces[[i, 2 * shards - 1 - i]]", "pieces[[2 * i, 2 * i + 1]]",
             "tests/test_sharding.py posenc_jax/sharding.py"),
    # Hugging Face.
    Mutation("query and key of a fused projection swap places", "hf/weights.py",
             "return weight[: cuts[0]], weight[cuts[0] : cuts[1]], weight[cuts[1] :]",
             "return weight[cuts[0] : cuts[1]], weight[: cuts[0]], weight[cuts[1] :]",
             "tests/hf/test_weights.py"),
    Mutation("partial rotary factor is ignored", "hf/rope.py",
             "fraction = 1.0 if fraction is None else fraction", "fraction = 1.0",
             "tests/hf/test_hf.py tests/hf/test_golden.py"),
    Mutation("GPT-2's scale does not fall with depth", "hf/other_types.py",
             "/ (layer + 1)", "/ 1",
             "tests/hf/test_hf.py"),
    Mutation("softcap of Gemma 2 is ignored", "hf/attention_options.py",
             "softcap=None if softcap is None else float(softcap)", "softcap=None",
             "tests/hf/test_attention_options.py"),
    Mutation("convolutions are read as attention", "hf/layer_kinds.py",
             "if kind in MIXERS:", "if kind == LINEAR:",
             "tests/hf/test_layers.py"),
    Mutation("sinks are read in layers without a window", "hf/attention_options.py",
             "if model_type.sinks_windowed_only and layer.window is None", "if False",
             "tests/hf/test_layers.py"),
    Mutation("bases of single layers are ignored", "hf/rotary.py",
             "settings[kind].theta if bases[i] is True else float(bases[i])",
             "settings[kind].theta",
             "tests/hf/test_layers.py"),
    Mutation("a null truncate is the default", "hf/rope.py",
             'part.truth("truncate", True)', 'part.get("truncate", True)',
             "tests/hf/test_hf.py"),
    Mutation("a null is_causal is the default", "hf/config_reader.py",
             'config.truth("is_causal", True)', 'config.get("is_causal", True)',
             "tests/hf/test_hf.py"),
    Mutation("rope parameters by kind are read where layers share a rotation", "hf/rotary.py",
             'if self.by_kind != "refused" and rope is not None', "if rope is not None",
             "tests/hf/test_hf.py"),
    Mutation("a key that repeats another may differ", "hf/api.py",
             "value in (None, wanted)", "True",
             "tests/hf/test_hf.py"),
    Mutation("keys with one value may have others", "hf/api.py",
             "tracked.only(key, *values)", "tracked.explicit(key)",
             "tests/hf/test_hf.py"),
    Mutation("the last layer of a model follows the pattern", "hf/layer_kinds.py",
             "text[: count - len(last)] + last", "text[:count]",
             "tests/hf/test_raw_configs.py"),
    Mutation("windows of config objects are halved twice", "hf/config_reader.py",
             "2 * (window - 1) if both_sides else window", "window",
             "tests/hf/test_hf.py"),
    Mutation("to_dict of Gemma 3n is believed", "hf/config_reader.py",
             "2 * (window - 1) if both_sides else window",
             'values["sliding_window"] if version >= (5, 16) or not both_sides else 2 * window - 2',
             "tests/hf/test_hf.py"),
    Mutation("files with halved windows are read", "hf/rotary_types.py",
             "not (4, 57) <= version < (5, 16)", "True",
             "tests/hf/test_hf.py"),
    # Files of somebody else.
    Mutation("installed modules are imported", "../experiments/settings/trust.py",
             "if not files or any(is_installed(str(file)) for file in files)", "if not files",
             "tests/experiments/test_trust.py"),
    Mutation("links hide where a module is", "../experiments/settings/trust.py",
             "(Path(os.path.abspath(file)), Path(os.path.realpath(file)))",
             "(Path(os.path.abspath(file)),)",
             "tests/experiments/test_trust.py"),
    Mutation("installed functions are called under names of one's own",
             "../experiments/settings/trust.py",
             "inner = inspect.unwrap(function)", "return True",
             "tests/experiments/test_trust.py"),
    Mutation("functions that return any tuple are called", "../experiments/models/schemes.py",
             "return bool(inner) and all(_of_schemes(x) for x in inner if x is not ...)",
             "return True",
             "tests/experiments/test_trust.py"),
    Mutation("part files follow links", "../experiments/runs/files.py",
             'beside.open("xb")', 'beside.open("wb")',
             "tests/experiments/test_trust.py"),
    Mutation("folders of runs may be links", "../experiments/runs/files.py",
             "os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW", "os.O_RDONLY",
             "tests/experiments/test_trust.py"),
]
# fmt: on


def copy_of_tree(folder):
    """Copies what git tracks, and what it does not ignore, to a folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", ":!results/s*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, listed):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run(folder, tests):
    """Returns the first test that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n0", *tests]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode in (0, 5):  # 5: none was selected.
        return None
    lines = (result.stdout + result.stderr).splitlines()
    failed = [x for x in lines if x.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else lines[-1]


def attempt(folder, mutation, everything):
    """Returns how a mutation ended: the test that caught it, or None."""
    path = folder / "posenc_jax" / mutation.path
    source = path.read_text()
    if source.count(mutation.old) != 1:
        return f"not applied: {source.count(mutation.old)} places"
    path.write_text(source.replace(mutation.old, mutation.new))
    try:
        tests = mutation.tests.split()
        if not all((folder / test.split("::")[0]).exists() for test in tests):
            return f"not applied: {mutation.tests} are not all there"
        return run(folder, tests) or (run(folder, []) if everything else None)
    finally:
        path.write_text(source)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names")
    parser.add_argument("--all", action="store_true", help="the whole suite, where others pass")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    chosen = [
        m for m in MUTATIONS if not arguments.names or any(n in m.name for n in arguments.names)
    ]
    if arguments.list:
        return print(*(f"{m.path}: {m.name}" for m in chosen), sep="\n")
    with tempfile.TemporaryDirectory() as top:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{top}/compiled")
        folders = [pathlib.Path(top, str(i)) for i in range(arguments.jobs)]
        for folder in folders:
            copy_of_tree(folder)
        survivors = []

        def work(mutation):
            folder, start = folders.pop(), time.monotonic()
            try:
                outcome = attempt(folder, mutation, arguments.all)
            finally:
                folders.append(folder)
            print(
                f"{time.monotonic() - start:4.0f} s  {mutation.name}: {outcome or 'SURVIVES'}",
                flush=True,
            )
            if outcome is None or outcome.startswith("not applied"):
                survivors.append(mutation.name)

        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(work, chosen))
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations are caught.")
    for name in survivors:
        print(f"  not caught: {name}")
    return sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
