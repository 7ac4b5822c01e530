"""One tile of attention: its logits, its mask, and the loops over tiles."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.problem import keep_mask
from posenc_jax.engine.tiling import Blocks, Side, cut, for_each
from posenc_jax.engine.xla_prepare import HIDDEN, Operands, Spec
from posenc_jax.engine.xla_spread import by_diagonal, by_diagonal_pulled
from posenc_jax.mask import visible


@dataclasses.dataclass(frozen=True)
class Tile:
    """Block i of queries against block j of keys, laid out [q, k], or [k, q] if flipped."""

    spec: Spec
    all: Operands
    blocks: Blocks
    flip: bool

    @property
    def q_axis(self) -> int:
        """The axis of queries in a tile with batch and head axes."""
        return 3 if self.flip else 2

    def queries(self, q: jax.Array) -> jax.Array:
        """Returns [B, N, Q, H] of [B, Q, N, H], as they meet the keys."""
        return jnp.swapaxes(q, 1, 2) * jnp.asarray(self.spec.q_factor, q.dtype)

    def products(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Returns float32 q . k of [B, N, Q, H] and [B, N, K, H]."""
        form = "bnkh,bnqh->bnkq" if self.flip else "bnqh,bnkh->bnqk"
        return einsum(form, k, q) if self.flip else einsum(form, q, k)

    def windows(self, i: jax.Array, j: jax.Array, plain: bool) -> tuple:
        """Returns the parts of the vector of distances and of the lines that the tile meets."""
        start = self.window_start(i, j)
        count = self.blocks.q + self.blocks.k - 1

        def part(x):
            return jax.lax.dynamic_slice_in_dim(x, start, count, 1)

        vector = self.all.vector
        if vector is not None and (not plain or self.spec.visibility.vector_in_all):
            vector = part(vector)
        else:
            vector = None
        lines = self.all.lines
        return vector, (None,) * len(lines) if plain else jax.tree.map(part, lines)

    def window_start(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Returns where that part begins: at the distance of the last key from the first query."""
        first = i * self.blocks.q - j * self.blocks.k - (self.blocks.k - 1)
        return self.spec.origin + first

    def ruled(self, plain: bool) -> bool:
        """Whether terms add something."""
        return any(term.in_all or not plain for term in self.all.terms)

    def added(self, windows, terms, q: dict, k: dict, *, plain: bool) -> Any:
        """Returns what rules add to the logits, or None for nothing."""
        vector, lines = windows
        out = None
        if vector is not None:
            sizes = self.all.q.shape[0], self.blocks.q, self.blocks.k
            spread = by_diagonal_pulled if self.flip else by_diagonal
            out = spread(vector, sizes, self.flip)
        for term, line, rows, cols in zip(terms, lines, q["rows"], k["cols"], strict=True):
            value = term.tile(line, rows, cols, q, k, plain=plain, flip=self.flip)
            if value is not None:
                out = value if out is None else out + value
        return out

    def seen(self, i, j, q: dict, k: dict) -> jax.Array | None:
        """Returns bool, broadcastable to the tile, or None where all is visible."""
        see, out = self.spec.visibility, None
        ordered = not see.folded and (see.is_causal or see.window is not None)
        if ordered or see.segments:
            out = visible(
                q["positions"],
                k["positions"],
                q["segments"],
                k["segments"],
                is_causal=see.is_causal and not see.folded,
                window=None if see.folded else see.window,
                prefix_length=self.all.prefix,
            )[:, None]
        if self.all.mask is not None:
            mask = cut(cut(self.all.mask, 2, i, self.blocks.q), 3, j, self.blocks.k)
            out = mask if out is None else out & mask
        if out is None or not self.flip:
            return out
        return jnp.swapaxes(out, 2, 3)

    def kept(self, q: dict, k: dict) -> jax.Array | None:
        """Returns the factor on every weight that dropout leaves, or None without dropout."""
        if self.all.seed is None:
            return None
        rate = self.spec.dropout_rate
        shape = self.all.q.shape[0], self.spec.heads
        keep = keep_mask(self.all.seed, rate, shape, q["slots"][0], k["slots"][0])
        kept = jnp.where(keep, jnp.float32(1 / (1 - rate)), 0.0)
        return jnp.swapaxes(kept, 2, 3) if self.flip else kept

    def logits(self, products, added, seen) -> tuple[jax.Array, jax.Array | None]:
        """Returns masked logits, and their derivative where there is a softcap."""
        x, slope = products, None
        if self.spec.factor != 1.0:
            x *= self.spec.factor
        if added is not None:
            x += added
        if self.spec.softcap is not None:
            bent = jnp.tanh(x / self.spec.softcap)
            x, slope = self.spec.softcap * bent, 1.0 - bent * bent
        return x if seen is None else jnp.where(seen, x, HIDDEN), slope

    def used(self, seen: jax.Array | None) -> jax.Array | None:
        """Returns bool [B or 1, N or 1, K], the keys that some query of the tile sees.

        None where every key is surely seen: in order, each by the query at its own place.
        """
        see = self.spec.visibility
        if seen is None or (see.ordered and not see.segments and not see.mask):
            return None
        return jnp.any(seen, axis=self.q_axis)


def clean_keys(used: jax.Array | None, x: Any, axis: int, heads: int = 1) -> Any:
    """Zeroes the keys, on `axis`, that nobody sees: whatever they hold, 0 * NaN is NaN."""
    if used is None:
        return x

    def clean(y):
        shape = [1] * y.ndim
        shape[0], shape[heads], shape[axis] = used.shape
        at = used if heads < axis else jnp.swapaxes(used, 1, 2)
        return jnp.where(at.reshape(shape), y, jnp.zeros((), y.dtype))

    return jax.tree.map(clean, x)


def einsum(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """A product that accumulates in float32, and is exact to float32 for such inputs."""
    exact = "highest" if x.dtype == jnp.float32 else None
    return jnp.einsum(form, x, y, precision=exact, preferred_element_type=jnp.float32)


def own_keys(x: jax.Array, heads: int) -> jax.Array:
    """[B, K, ...] to [B, N, ...]: every query head's own keys."""
    return x if x.shape[1] == heads else jnp.repeat(x, heads // x.shape[1], axis=1)


def sides(spec: Spec, operands: Operands, blocks: Blocks) -> tuple[Side, Side]:
    """Returns what is known of the blocks of queries and of keys."""
    see = spec.visibility
    return see.side(operands.by_q, blocks.q), see.side(operands.by_k, blocks.k)


def visit(spec, q_side, k_side, prefix, count, body, carry):
    """Runs `body(plain)(index, carry)` over the tiles of a row or column that are not empty."""
    see = spec.visibility
    if count == 1:
        return body(plain=see.always_plain)(jnp.int32(0), carry)
    near, plain = see.classify(q_side, k_side, prefix)
    if not see.always_plain:
        carry = for_each(near, body(plain=False), carry)
    if not see.never_plain:
        carry = for_each(plain, body(plain=True), carry)
    return carry


def scan_blocks(step, carry, count: int):
    """`lax.scan` over block numbers; a single block needs no loop."""
    if count == 1:
        carry, out = step(carry, jnp.int32(0))
        return carry, jax.tree.map(lambda x: x[None], out)
    return jax.lax.scan(step, carry, jnp.arange(count, dtype=jnp.int32))
