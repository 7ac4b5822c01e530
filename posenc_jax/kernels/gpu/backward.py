"""The backward pass for GPUs: dq, dk and dv, and the cotangents of position rules.

The three kernels sum over tiles in one fixed order and add to nothing in memory, so that results
are bitwise reproducible: dq over the keys of a block of queries, dk and dv over the queries of a
block of keys, the bias over the tiles at one distance from the diagonal. Each computes the weights
of its tiles again, the last one only of tiles with rules.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.kernels.elements import Element
from posenc_jax.kernels.gpu.backward_distances import bias_grads, vector_grads
from posenc_jax.kernels.gpu.backward_keys import key_grads
from posenc_jax.kernels.gpu.backward_pairs import pair_grads
from posenc_jax.kernels.gpu.band_arrays import d_logits_scale, feature_grads
from posenc_jax.kernels.gpu.by_query import ByQuery
from posenc_jax.kernels.gpu.pipe import Warpgroup, launch, matrix, most_slots, operand, vector
from posenc_jax.kernels.gpu.spec import ROW, ROWS, Cotangents, GPUSpec, Int, Ref
from posenc_jax.kernels.gpu.tile import d_logits, row_scalar_count, rows_to_tile, zeros
from posenc_jax.kernels.operands import Grads, Operands, Product, out_struct


def backward(
    spec: GPUSpec, x: Operands, d_out: jax.Array, lse: jax.Array, delta: jax.Array
) -> Grads:
    """Returns the cotangents of the operands; see `Kernels.run_backward`."""
    scale: Any = d_logits_scale(x, d_out, delta) if x.products else None
    cotangents = Cotangents(d_out, lse, delta, scale)
    d_q, sums_of_q, q_features = _query_grads(spec, x, cotangents)
    d_k, d_v, sums_of_k, k_features = key_grads(spec, x, cotangents)
    d_bias = None
    if x.bias is not None:
        d_bias = jnp.zeros_like(x.bias)
        if spec.rules_in_bias:
            d_bias = bias_grads(spec, x, x.bias, cotangents)
    elements = map(_element, x.elements, sums_of_q, sums_of_k)
    d_features = {False: iter(q_features), True: iter(k_features)}
    products = tuple(
        Product(
            feature_grads(spec, product, next(d_features[product.of_keys]), scale),
            vector_grads(spec, x, n, cotangents),
            product.of_keys,
        )
        for n, product in enumerate(x.products)
    )
    pairs = pair_grads(spec, x, cotangents)
    return Grads(d_q, d_k, d_v, d_bias, tuple(elements), products, pairs)


def _element(element: Element, of_q: list[jax.Array], of_k: list[jax.Array]) -> Element:
    """Returns the cotangents of an element, from sums over keys, [B, N, T], and over queries."""
    count = len(element.scalars)

    def by_key_head(d, like):
        return d.reshape(d.shape[0], like.shape[1], -1, 1, d.shape[2]).sum(2)

    return dataclasses.replace(
        element,
        scalars=tuple(d.sum((0, 2)) for d in of_q[:count]),
        q_scalars=tuple(d[:, :, None] for d in of_q[count:]),
        k_scalars=tuple(map(by_key_head, of_k, element.k_scalars)),
    )


def _query_grads(
    spec: GPUSpec, x: Operands, cotangents: Cotangents
) -> tuple[jax.Array, list[list[jax.Array]], list[jax.Array]]:
    """Returns dq, for each element sums of its cotangents over keys, [B, N, T], and of features."""
    kernel = QueryGrads(spec, x, spec.backward, x.schedules[1])
    per_query = out_struct(x.q, (spec.batch, spec.heads, spec.length))
    grads = launch(
        "attention_backward_q",
        kernel.compute,
        kernel.copy,
        grid=kernel.grid,
        inputs=kernel.inputs | {"cotangents": cotangents},
        out_types={
            "q": out_struct(x.q, x.q.shape, x.q.dtype),
            "sums": [[per_query] * row_scalar_count(e, 0) for e in x.elements],
            "features": kernel.bands.out_types,
        },
        scratch_types=kernel.scratch_types,
        interpret=spec.interpret,
    )
    return grads["q"], grads["sums"], grads["features"]


@dataclasses.dataclass(frozen=True)
class QueryGrads(ByQuery):
    """The kernel of dq and of sums over keys."""

    @property
    def scratch_types(self) -> dict[str, Any]:
        """The scratch types of the kernel, by name."""
        spec, dtype = self.spec, self.x.q.dtype
        types = {
            "q": matrix(spec, 2, ROWS, spec.dim, dtype=dtype),
            "d_out": matrix(spec, 2, ROWS, spec.value_dim, dtype=dtype),
            "ready": plgpu.Barrier(num_arrivals=2 + len(self.bands.resident), num_barriers=2),
            "sums": vector(2, ROWS),
        }
        if spec.interpret:
            types["operand"] = operand(spec.backward.k, dtype)
        return most_slots(lambda *slots: types | self.pipes(*slots))

    def compute(self, wg: Warpgroup) -> None:
        """Computes 64 queries."""
        q0, count = self.queries(wg)
        b, head = wg.grid["b"], wg.grid["head"]
        of_head = b, pl.ds(q0, ROWS), head
        q, ready = wg.part("q"), wg.part("ready")
        plgpu.copy_gmem_to_smem(wg.refs["x"].q.at[of_head], q, ready)
        d_out = wg.refs["cotangents"].d_out.at[of_head]
        plgpu.copy_gmem_to_smem(d_out, wg.part("d_out"), ready)
        self.bands.copy_rows(wg, b, head, q0)
        rows = wg.refs["cotangents"].rows(b, head, q0)
        plgpu.barrier_wait(ready)

        def over_tiles(d_q, *d_features):
            def step(n, carry):
                return self._add_tile(wg, n, rows, d_q, d_features, *carry)

            start = [[zeros((ROWS,), ROW)] * row_scalar_count(e, 0) for e in self.x.elements]
            _, sums = jax.lax.fori_loop(jnp.int32(0), count, step, (jnp.int32(0), start))
            return sums, d_q[...], [d[...] for d in d_features]

        acc = plgpu.ACC((ROWS, self.spec.dim), jnp.float32)
        sums, d_q, d_features = pl.run_scoped(over_tiles, acc, *self.bands.accumulators)
        for d, out_ref in zip(d_features, wg.out_refs["features"], strict=True):
            out_ref.at[b, head, pl.ds(q0, ROWS)][...] = d
        q[...] = (d_q * self.spec.scale).astype(self.x.q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, wg.out_refs["q"].at[of_head])
        plgpu.wait_smem_to_gmem(0)
        wg.write_rows(sums, wg.out_refs["sums"], "sums", b, head, q0)

    def _add_tile(
        self,
        wg: Warpgroup,
        n: Int,
        rows: list[jax.Array],
        d_q: Ref,
        d_features: tuple[Ref, ...],
        ruled: Int,
        sums: list[list[jax.Array]],
    ) -> tuple[Int, list[list[jax.Array]]]:
        """Adds the cotangents of tile n.

        Args:
          wg: the warpgroup.
          n: the tile.
          rows: lse and delta of the queries.
          d_q, d_features: accumulators.
          ruled: the number of tiles with rules before it.
          sums: over keys, of the cotangents of elements.

        Returns:
          `ruled` and `sums` with this tile.
        """
        tile = self.tile(wg, n)
        self.bands.prepare(wg, tile, ruled)
        keys, values = wg.scratch["keys"].wait(n), wg.scratch["values"].wait(n)
        lse, delta = (rows_to_tile(y, tile.shape) for y in rows)
        pairs = (wg.part("q"), keys["k"]), (wg.part("d_out"), values["v"])
        p, slope, (d_p,) = tile.weights(lse, *pairs)
        wg.scratch["values"].release(n)
        ds = d_logits(p, d_p, delta, slope)
        sums = tile.add_element_grads(ds, sums)
        wg.product(d_q, ds.astype(self.x.q.dtype), keys["k"])
        plgpu.wgmma_wait(0)
        wg.scratch["keys"].release(n)
        self.release_bias(wg, n)
        if d_features:
            ds = ds * wg.refs["cotangents"].scale[0]
        self.bands.add_feature_grads(wg, d_features, ds, tile, ruled)
        return self.bands.release(wg, tile, ruled), sums
