"""The table of all schemes, computed from their classes: `python -m experiments schemes`."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

import posenc_jax as pe
from experiments.models.schemes import paper_link, with_sizes
from experiments.settings.config_io import Parser

SIZES = {
    **dict.fromkeys(("num_heads", "num_kv_heads"), 4),
    **{"head_dim": 16, "model_dim": 64, "max_length": 32, "trained_length": 32},
}
COLUMNS = (
    "name",
    "class",
    "family",
    "acts on",
    "learned",
    "cached",
    "relative",
    "runs on",
    "paper",
)
IMPLEMENTATIONS = ("reference", "dense", "xla", "jax")


def main(arguments: list[str]) -> int:
    """Prints the table as Markdown; returns the exit status."""
    Parser(
        prog="python -m experiments schemes",
        description="Prints a Markdown table of all schemes: where they act, their parameters, the "
        "entries of a cache per token, and the implementations of attention that run them.",
    ).parse_args(arguments)
    print(table())
    return 0


def table() -> str:
    """Returns the table of `posenc_jax.SCHEMES`."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(row(name) for name in sorted(pe.SCHEMES))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def row(name: str) -> tuple[str, ...]:
    """Returns the row of one scheme."""
    cls = pe.SCHEMES[name]
    scheme = with_sizes(cls, SIZES)
    learned = sum(x.size for x in jax.tree.leaves(jax.eval_shape(scheme.init, jax.random.key(0))))
    link = paper_link(cls)
    return (
        f"`{name}`",
        f"`{cls.__name__}`",
        cls.__module__.split(".")[-2],
        str(scheme.acts),
        f"{learned:,}" if learned else "no",
        cached(scheme),
        "yes" if scheme.traits.relative else "no",
        runs_on(scheme),
        f"[{link.rsplit('/', 1)[-1]}]({link})",
    )


def cached(scheme: pe.Scheme) -> str:
    """Returns the entries of a cache: keys as used or raw, values, and arrays of the scheme."""
    if not scheme.acts_in_attention:
        return "k, v"
    heads, dim, model = (SIZES[n] for n in ("num_heads", "head_dim", "model_dim"))
    cache = jax.eval_shape(
        lambda: pe.new_cache(scheme, 1, 2, num_heads=heads, head_dim=dim, model_dim=model)
    )
    keys = "k" if scheme.traits.cache_transformed_keys else "raw k"
    more = [n for n in ("k_features", "state") if jax.tree.leaves(getattr(cache, n))]
    words = {"k_features": "more per key", "state": "running sums"}
    return ", ".join([keys, "v", *(words[n] for n in more)])


def runs_on(
    scheme: pe.Scheme, implementations: Iterable[str | pe.Implementation] = IMPLEMENTATIONS
) -> str:
    """Returns the implementations of attention that run a scheme with the sizes of the table."""
    if not scheme.acts_in_attention:
        return "any"
    q = jnp.zeros((1, 32, SIZES["num_heads"], SIZES["head_dim"]))
    x = jnp.zeros((1, 32, SIZES["model_dim"]))
    params = jax.eval_shape(scheme.init, jax.random.key(0))

    def runs(implementation: str | pe.Implementation) -> bool:
        try:
            jax.eval_shape(
                lambda params, q: pe.scheme_attention(
                    scheme, params, q, q, q, x=x, is_causal=True, implementation=implementation
                )[0],
                params,
                q,
            )
        except NotImplementedError:
            return False
        return True

    return ", ".join(str(word) for word in implementations if runs(word))
