"""Faults to inject into the kernels, the steps that find them, and the places that these name."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from posenc_jax.kernels.checks import cases, tpu_primitives
from posenc_jax.kernels.checks.steps import Step, steps
from posenc_jax.kernels.tpu import backward, decode, forward, schedule, spec, strip

SHEAR, DIAGONALS, HEADS, ENTRIES = (
    "primitives: shear of a strip",
    "primitives: sums of diagonals",
    "primitives: heads of a block of tokens, K = 2, bfloat16",
    "primitives: entries of a schedule",
)
FORWARD, GROUPED, SOFTCAP, BACKWARD, DECODE = (
    "forward: no rule",
    "forward: table, window, grouped heads",
    "forward: table, segments, softcap",
    "backward: table by distance",
    "decode: 2 heads of keys",
)
SELECTION = SHEAR, DIAGONALS, HEADS, ENTRIES, FORWARD, GROUPED, SOFTCAP, BACKWARD, DECODE
"""The steps that run with each fault of the TPU's kernels."""

READS, PIPE = "primitives: reads by distance, 64 x 32", "primitives: a pipe of two slots"
GPU_SELECTION = READS, PIPE


@dataclasses.dataclass(frozen=True)
class Fault:
    """One small wrong change.

    Attributes:
      name: the fault.
      inject: applies it by a `pytest.MonkeyPatch`.
      step: the step of the selection that names the place.
      place: a regular expression for the place that it names.
      fails: the other steps of the selection that fail.
      gpu: whether it is in the GPU's kernels.
    """

    name: str
    inject: Callable[[Any], None]
    step: str
    place: str
    fails: tuple[str, ...] = ()
    gpu: bool = False


def wrapped(owner: Any, name: str, make: Callable[[Callable], Callable]) -> Callable[[Any], None]:
    """Returns `inject` that replaces a function by `make(function)`."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def _parity(patch):
    def other(head_of_tokens):
        return lambda block, head: head_of_tokens(block, head ^ 1)

    for module in (decode, tpu_primitives):
        wrapped(module, "head_of_tokens", other)(patch)


def _stale(key_block):
    def previous(self, h, b, t, schedule_ref, prefix_ref):
        b, h, block = key_block(self, h, b, t, schedule_ref, prefix_ref)
        last = schedule.is_last(self.entry(schedule_ref, b, t))
        return b, h, jnp.maximum(block - jnp.where(last, 1, 0), 0)

    return previous


def _next_head(key_block):
    def other(self, *indices):
        b, head, block = key_block(self, *indices)
        return b, jax.lax.rem(head + 1, jnp.int32(self.spec.kv_heads)), block

    return other


def _entry(make_schedule):
    def wrong(see, q, k, prefix, blocks, order, by_key):
        entries = make_schedule(see, q, k, prefix, blocks, order, by_key)
        here = (order[0] == 2) & (order[1] == 0) & (not by_key)
        return entries + schedule.entry_of(0, here.astype("int32"), 0, 0, 0)[None]

    return wrong


def _shifted(line_of):
    return lambda values, first, *rest: line_of(values, first + 1, *rest)


def _without_dk(tile):
    def wrong(self, ruled, masked):
        before = self.scratch["d_k"][self.keys]
        tile(self, ruled, masked)
        after = self.scratch["d_k"][self.keys]
        self.scratch["d_k"][self.keys] = jnp.where(self.offset == 256, before, after)

    return wrong


def _mask_edge(visible):
    return lambda spec, shape, axis, offset, *rest: visible(spec, shape, axis, offset + 1, *rest)


def _page(block):
    def wrong(self, *indices):
        row, page = block(self, *indices)
        return row, jax.lax.rem(page + 1, jnp.int32(self.steps))

    return wrong


def _scaled(finish):
    def wrong(scratch, out_ref, *rest):
        lse = finish(scratch, out_ref, *rest)
        out_ref[...] = (out_ref[...].astype(jnp.float32) * 1.01).astype(out_ref.dtype)
        return lse

    return wrong


def _scaled_bias(add_to_d_strip):
    return lambda self, ds, bias_lanes: add_to_d_strip(self, 1.02 * ds, bias_lanes)


def _early(finished):
    def wrong(self, *indices):
        b, head, block = finished(self, *indices)
        return b, head, jnp.maximum(block - 1, 0)

    return wrong


def _kept_sums(start):
    def wrong(self):
        pass

    return wrong


def _no_wait(patch):
    from posenc_jax.kernels.gpu import pipe

    def fill(self, step, **sources):
        slot = self._slot(step)
        for name, ref in self.slots.items():
            pipe.plgpu.copy_gmem_to_smem(sources[name], ref.at[slot], self.full.at[slot])

    patch.setattr(pipe.Pipe, "fill", fill)


def _no_fence(patch):
    from posenc_jax.kernels.gpu import pipe

    def release(self, step):
        pipe.plgpu.barrier_arrive(self.free.at[self._slot(step)])

    patch.setattr(pipe.Pipe, "release", release)


def _far_reads(patch):
    from posenc_jax.kernels.checks import gpu_primitives

    def one_further(by_distance):
        def read(ref, shape, axis, origin, interpret):
            return by_distance(ref, shape, axis, origin - 1, interpret)

        return read

    wrapped(gpu_primitives, "by_distance", one_further)(patch)


_ALL = FORWARD, GROUPED, SOFTCAP, BACKWARD
FAULTS = (
    Fault(
        "the wrong half of a word that holds two heads",
        _parity,
        HEADS,
        "head 0, token 0, lane 0: 1, expected 0",
        (DECODE,),
    ),
    Fault(
        "the last block of keys of a row is the one before",
        wrapped(forward.ForwardGrid, "key_block_of_query_head", _stale),
        FORWARD,
        "tile row 1, tile column 1: 0, .*; tile column 0 was read",
        _ALL[1:],
    ),
    Fault(
        "keys and values of the next head",
        wrapped(forward.ForwardGrid, "key_block", _next_head),
        FORWARD,
        "batch 0, head 0, tile row 0.*; batch 0, head 1 was read",
        _ALL[1:],
    ),
    Fault(
        "an entry of the schedule names the next column",
        wrapped(spec, "schedule", _entry),
        FORWARD,
        "tile row 2, tile column 0: 0, .*; tile column 1 was read",
        _ALL[1:],
    ),
    Fault(
        "a strip shifted by one lane",
        wrapped(spec, "line_of", _shifted),
        FORWARD,
        "tile row 0, .*query 0 sees 0 keys, expected 1",
        _ALL[1:],
    ),
    Fault(
        "rotations by one lane too many",
        wrapped(strip, "_within_eight", lambda f: lambda x, sign: jnp.roll(f(x, sign), 1, 1)),
        SHEAR,
        "row 0, lane 0: 126, expected 127",
        (DIAGONALS, *_ALL),
    ),
    Fault(
        "a tile is left out of dk",
        wrapped(backward.BackwardStep, "tile", _without_dk),
        BACKWARD,
        "dk: batch 0, head 0, tile row 2, tile column 0: 0, expected 0.13",
    ),
    Fault(
        "the mask lets a later key pass",
        wrapped(forward, "visible", _mask_edge),
        SOFTCAP,
        "tile row 0, .*query 0 sees 2 keys, expected 1",
    ),
    Fault(
        "the next page in decoding",
        wrapped(decode.DecodeGrid, "block", _page),
        DECODE,
        "batch 1, .*query 0 sees 0 keys, expected 100",
    ),
    Fault(
        "the output is 1.01 times too large",
        wrapped(forward, "finish_softmax", _scaled),
        FORWARD,
        "output: batch 0, head 0: 1.0.* times what is expected",
        _ALL[1:],
    ),
    Fault(
        "the cotangent of a bias is 1.02 times too large",
        wrapped(backward.BackwardStep, "_add_to_d_strip", _scaled_bias),
        BACKWARD,
        "gradient of table: 1.0.* times what is expected",
    ),
    Fault(
        "dq is written to the block before",
        wrapped(backward.BackwardGrid, "finished_query_block", _early),
        BACKWARD,
        "dq: batch 0, head 0, tile row",
    ),
    Fault(
        "dk and dv do not start at zero",
        wrapped(backward.BackwardStep, "start_key_grads", _kept_sums),
        BACKWARD,
        "dk: batch 0, head 0, tile row",
    ),
    Fault("a slot is released without a fence", _no_fence, PIPE, "RACE DETECTED", gpu=True),
    Fault("copies do not wait for readers", _no_wait, PIPE, "RACE DETECTED", gpu=True),
    Fault(
        "reads by distance are one too far",
        _far_reads,
        READS,
        "warpgroup 0, row 0, column 0: 31, expected 32",
        gpu=True,
    ),
)


def selected(gpu: bool, names: tuple[str, ...]) -> list[Step]:
    """Returns steps by name, in the interpreter; that for GPUs looks for races."""
    if not gpu:
        return [step for step in steps(interpret=True, small=True) if step.name in names]
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from posenc_jax.kernels.checks import gpu_primitives

    checked = plgpu.InterpretGPUParams(detect_races=True)
    return [
        Step(f"primitives: {x.name}", "primitives", str(x.want.dtype), x.run)
        for x in gpu_primitives.primitives(checked, small=True)
        if f"primitives: {x.name}" in names
    ]


@contextlib.contextmanager
def injected(fault: Fault) -> Iterator[None]:
    """Applies a fault; nothing that was traced with it or without it is used again."""

    def forget():
        cases.executable.cache_clear()
        jax.clear_caches()
        if fault.gpu:  # The interpreter keeps its state after an error.
            from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

            interpret_pallas_call.reset_gpu_interpret_mode_state()

    forget()
    with pytest.MonkeyPatch.context() as patch:
        fault.inject(patch)
        try:
            yield
        finally:
            forget()


def outcome(step: Step) -> str | None:
    """Returns the place that a step names, or the error that it raises."""
    try:
        return step.run()
    except Exception as error:
        text = str(error)
        if "RACE DETECTED" not in text:
            return text[-300:]
        lines = text[text.find("RACE DETECTED") :].split("\n")[1:4:2]
        return "RACE DETECTED: " + "; ".join(_access(x) for x in lines)


def _access(line: str) -> str:
    """Returns the kind of an access and its function, from a line about a race."""
    return f"{line.split()[0]} in {line[line.rfind('(') + 1 : -1]}"


def outcomes(fault: Fault) -> dict[str, str]:
    """Returns the places that failing steps of the selection name, by step."""
    names = GPU_SELECTION if fault.gpu else SELECTION
    with injected(fault):
        said = {step.name: outcome(step) for step in selected(fault.gpu, names)}
    return {name: text for name, text in said.items() if text is not None}
