"""The page of a study of lengths, its numbers and its picture, made from results."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import posenc_jax as pe
from experiments.claims import (
    FAILS,
    GATE_FAILED,
    HOLDS,
    NOT_RESOLVED,
    NOT_RUN,
    Margin,
    Outcome,
)
from experiments.lengths.plan import WIDTH, Plan
from experiments.lengths.results import BIN, CELLS, CellResult
from experiments.lengths.scores import LEAST, Table
from experiments.models.methods import seen
from experiments.pages import plots
from experiments.pages.page import as_csv, command_of, files_of, table
from experiments.runs import results
from experiments.stats import Bounds, interval, mean, ordered, plus_minus, signed


def pages(plan: Plan, file: Path, folder: Path, target: Path) -> dict[Path, str]:
    """Returns the texts of the page, its numbers and pictures by path; `file` is of the plan."""
    known = results.read(folder, CELLS)
    cells, scores = [*plan.cells()], Table(plan, known)
    done = [known[cell.name] for cell in cells if cell.name in known]
    outcomes = [scores.judge(claim) for claim in plan.claims]
    pictures = {f"{target.stem}{end}.svg": svg for end, svg in drawings(scores).items() if svg}
    part = "" if len(done) == len(cells) else ": others are left out, and numbers may change"
    about, link = plan.checkpoint, os.path.relpath(file, target.parent)
    text = "\n\n".join(
        [
            f"# {plan.title}",
            *_words(scores, "answer"),
            f"Made by `{command_of('lengths', file, folder, target)}` from results in `{folder}`; "
            f"[{target.stem}.csv]({target.stem}.csv) has all\nnumbers. "
            f"**{len(done)} of {len(cells)} passes have run**{part}.",
            f"{about.name} was trained with RoPE on {about.trained:,} tokens. Here it reads longer "
            "documents by methods\nwithout training, with settings of their authors "
            f"([methods](../experiments/models/methods.py)).{_windows(about.layers)}",
            *_pictured(scores, [*pictures]),
            *_table(scores),
            *_words(scores, "remark"),
            *_claims(plan, outcomes, link, f"{target.stem}.csv"),
            *_protocol(plan, done, link),
        ]
    )
    return files_of(target, folder, text + "\n", as_csv([*numbers(scores, outcomes)]), pictures)


def _windows(layers: Sequence[pe.LayerSpec]) -> str:
    sizes = [seen(layer) for layer in layers if layer.window is not None]
    if not sizes:
        return ""
    return (
        f" {len(sizes)} of its {len(layers)} layers have windows of "
        f"{' and '.join(f'{size:,}' for size in sorted({*sizes}))} tokens; methods\nchange the "
        "others."
    )


def _documents(scores: Table) -> str:
    """Returns how many documents have the losses that the picture shows."""
    plan, methods = scores.plan, ("rope", scores.plan.picture.minus)
    return str(
        sum(
            all(scores.losses(document, method, plan.shortest) for method in methods)
            for document in plan.all_documents
        )
    )


def _pictured(scores: Table, pictures: Sequence[str]) -> Iterator[str]:
    plan, context = scores.plan, scores.plan.probe.contexts[-1] // 1024
    for file in pictures:
        if file.endswith("-answers.svg"):
            yield f"![Answers by distance]({file})"
            documents = len(scores.probed_by(plan.picture.answers))
            yield f"In {context}k tokens; mean of {documents} documents."
            continue
        yield f"![{plan.picture.caption}]({file})"
        yield (
            f"{plan.picture.legend.strip()} Scalings are for {plan.shortest // 1024}k. "
            f"Mean of {_documents(scores)} of {len(plan.all_documents)} documents."
        )


def _table(scores: Table) -> Iterator[str]:
    plan = scores.plan
    if not (lines := [*rows(scores)]):
        return
    longest = len(scores.values("rope", "far", plan.longest))
    probed = len(scores.values("rope", "answer", plan.probe.contexts[0]))
    yield table(heads(plan), lines)
    yield (
        "RoPE's nats per token, and differences to it with 95 % intervals over documents "
        f"(Student's t, paired; {_documents(scores)},\nand {longest} in passes to "
        f"{plan.longest // 1024}k). Answers: nats of a five-digit number that the text states "
        f"once, 11.5 by chance ({probed} documents).\nCopies: nats per token of a repeated "
        "paragraph, minus the nats where it is new. Processor time relative to RoPE, and\nmemory "
        f"without the parameters at {plan.shortest // 1024}k."
    )


def _words(scores: Table, name: str) -> Iterator[str]:
    """Yields the answer or the remark of the file, once its numbers are known."""
    text = getattr(scores.plan, name).strip()
    for words, condition in scores.plan.in_braces(name).items():
        values = [condition.margin(score) for score in scores.units([condition])]
        text = text.replace(f"{{{words}}}", plus_minus(values, "")) if values else ""
    if text:
        yield text


def _claims(plan: Plan, outcomes: Sequence[Outcome], link: str, numbers: str) -> Iterator[str]:
    few = sum(outcome.word == NOT_RUN for outcome in outcomes)
    yield "## Claims"
    yield (
        f"[Their criteria]({link}) precede the first pass, unless the protocol says otherwise. A\n"
        f"claim holds if all of its intervals do, over {LEAST} documents at least. "
        '"The length" is the trained one, '
        '"within" is up to it.' + (f"\n{few} of {len(outcomes)} have too few." if few else "")
    )
    holding = sum(outcome.word == HOLDS for outcome in outcomes)
    yield f"**{holding} of {len(outcomes)} hold**; [{numbers}]({numbers}) has all of them."
    for word, title in _WORDS.items():
        if lines := [f"* {_claim(outcome)}." for outcome in outcomes if outcome.word == word]:
            reason = f": {plan.silent}" if word == GATE_FAILED and plan.silent else ""
            yield f"**{title}{reason}:**"
            yield "\n".join(lines)


_WORDS = {
    FAILS: "Fail",
    NOT_RESOLVED: "Not resolved",
    GATE_FAILED: "Gate failed",
}


def _protocol(plan: Plan, done: Sequence[CellResult], link: str) -> Iterator[str]:
    kinds = ", ".join(f"{name} ({', '.join(x.documents)})" for name, x in plan.kinds.items())
    lines = [
        f"* The longest {kinds}, by\n  [rules]({link}). The model may have read them in training.",
        *(f"* {text}" for text in plan.protocol),
        "* Many intervals: one that only just excludes 0 may be chance.",
    ]
    if done:
        hours = sum(x.cpu_seconds + x.compile_seconds for x in done) / 3600
        versions = (
            ", ".join(f"{name} {x.environment.get(name)}" for name in ("jax", "flax", "numpy"))
            for x in done
        )
        processors = (str(x.environment.get("processor")) for x in done)
        lines.append(
            f"* {hours:.1f} hours of processor time, at most "
            f"{max(x.peak_mib for x in done) / 2**10:.1f} GiB; {'; '.join(ordered(versions))}; "
            f"{'; '.join(ordered(processors))}; code {', '.join(ordered(x.commit for x in done))}."
        )
    yield "## Protocol"
    yield "\n".join(lines)


def _claim(outcome: Outcome) -> str:
    if outcome.word not in (FAILS, NOT_RESOLVED):
        return outcome.claim.claim
    side = False if outcome.word == FAILS else None
    deciding = [m for m in outcome.criteria if m.side is side]
    return f"{outcome.claim.claim} (misses its limit by {signed(max(map(_missed, deciding)))})"


def _missed(margin: Margin) -> Bounds:
    """Returns by how much a condition is on the other side of its limit."""
    middle, low, high = margin.bounds
    return margin.bounds if margin.condition.holds_at(-1.0) else (-middle, -high, -low)


def columns(plan: Plan) -> list[tuple[str, str, int]]:
    """The losses of the table: head, view and length."""
    trained, target, longest = plan.checkpoint.trained, plan.shortest, plan.longest
    out = [(f"to {trained // 1024}k", "within", target)]
    middle = (trained + target) // 2 // WIDTH * WIDTH
    places = [("at", middle), ("at", target), ("far", longest)]
    if longest == target:
        places.pop()
    for view, length in dict.fromkeys(places):
        out.append((f"{(length - WIDTH) // 1024}-{length // 1024}k", view, length))
    return out


def heads(plan: Plan) -> list[str]:
    contexts, copies = _probed(plan)
    return [
        "method",
        *(head for head, _, _ in columns(plan)),
        "answers " + ", ".join(f"{n // 1024}k" for n in contexts),
        "copies " + ", ".join(f"{n // 1024}k" for n in copies),
        "time",
        "MiB",
    ]


def _probed(plan: Plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The contexts and the distances that the table shows."""
    trained, contexts, distances = (
        plan.checkpoint.trained,
        plan.probe.contexts,
        plan.probe.distances,
    )
    half = max((n for n in distances if n <= trained // 2), default=distances[0])
    return (contexts[0], contexts[-1]), (half, min(n for n in distances if n > trained))


def rows(table: Table) -> Iterator[list[str]]:
    """Yields the rows of the table: RoPE's losses, and the differences of others to them."""
    contexts, copies = _probed(table.plan)
    most = len(table.values("rope", "at", table.plan.shortest))
    for method in table.plan.methods:
        base = None if method == "rope" else "rope"
        count = len(table.values(method, "at", table.plan.shortest, base))
        fewer = f" ({count} documents)" if 0 < count < most else ""
        cells = [
            plus_minus(table.values(method, view, length, base), "+" if base else "", 3)
            for _, view, length in columns(table.plan)
        ]
        for view, lengths in (("answer", contexts), ("copied", copies)):
            means = [mean(table.values(method, view, n)) for n in lengths]
            cells.append(
                "" if any(map(math.isnan, means)) else ", ".join(f"{x:.1f}" for x in means)
            )
        ratio, memory = table.ratio(method), table.memory(method)
        cells.append("" if math.isnan(ratio) else f"{ratio:.2f}")
        cells.append("" if math.isnan(memory) else f"{memory:,.0f}")
        if any(cells):
            yield [f"`{method}`{fewer}", *cells]


def numbers(table: Table, outcomes: list[Outcome]) -> Iterator[dict[str, str]]:
    """Yields all scores and differences to RoPE with their intervals, and the claims."""
    plan = table.plan
    keys = [("within", plan.shortest), ("within", plan.longest)]
    keys += [("at", n) for n in range(WIDTH, plan.shortest + 1, WIDTH)]
    keys += [("far", n) for n in range(WIDTH, plan.longest + 1, WIDTH)]
    keys += [(view, n) for view in ("answer", "found") for n in plan.probe.contexts]
    keys += [("copied", n) for n in plan.probe.distances]
    near = plan.probe_within.distances if plan.probe_within else ()
    gates = [("copied_within", n) for n in near]
    for method in plan.methods:
        for view, length in keys + gates * (method == "rope"):
            values = table.values(method, view, length)
            if not values:
                continue
            line = {"kind": "score", "name": method, "view": view, "length": str(length)}
            line |= {"documents": str(len(values)), "mean": f"{mean(values):.4f}"}
            if method != "rope" and (paired := table.values(method, view, length, "rope")):
                names = "difference to rope", "low", "high"
                bounds = zip(names, interval(paired), strict=True)
                line |= {name: f"{x:.4f}" for name, x in bounds if math.isfinite(x)}
            yield line
    for outcome in outcomes:
        for margin in outcome.criteria:
            middle, low, high = margin.bounds
            yield {
                "kind": "claim",
                "name": outcome.claim.claim,
                "view": margin.condition.text,
                "documents": str(len(margin.values)),
                "mean": f"{middle:.4f}",
                "low": f"{low:.4f}",
                "high": f"{high:.4f}",
                "outcome": outcome.word,
            }


def drawings(table: Table) -> dict[str, str]:
    """Returns the plots of answers by distance and of losses by place; "" without results."""
    plan, lines = table.plan, {}
    for method in plan.picture.methods:
        pairs = [
            (ours, base)
            for document in plan.all_documents
            if (ours := table.losses(document, method, plan.shortest))
            and (base := table.losses(document, plan.picture.minus, plan.shortest))
        ]
        if pairs:
            lines[method] = [
                mean(ours[i] - base[i] for ours, base in pairs) for i in range(len(pairs[0][0]))
            ]
    trained, minus = plan.checkpoint.trained, plan.picture.minus
    answers = table.answers(plan.picture.answers)
    names = ordered([*plan.picture.methods, *plan.picture.answers])
    return {
        "-answers": plots.answers(answers, names, trained, "answers") if answers else "",
        "": plots.by_place(lines, BIN, trained, minus, "lengths") if lines else "",
    }
