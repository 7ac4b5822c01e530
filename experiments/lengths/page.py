"""The page of a study of lengths, its numbers and its picture, made from results."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from experiments.claims import FAILS, GATE_FAILED, HOLDS, NOT_RESOLVED, NOT_RUN
from experiments.lengths.plan import WIDTH, Plan
from experiments.lengths.results import BIN, CELLS
from experiments.lengths.scores import LEAST, Outcome, Table
from experiments.models.methods import window
from experiments.pages import plots
from experiments.pages.page import as_csv, as_html, fill
from experiments.runs import results
from experiments.stats import interval, mean, ordered, plus_minus


def pages(plan: Plan, file: Path, folder: Path, target: Path) -> dict[Path, str]:
    """Returns the texts of the page, of its numbers and of its picture, by path.

    `file` and `folder` are of the plan and its results, `target` is the page.
    """
    known = results.read(folder, CELLS)
    table = Table(plan, known)
    names = [cell.name for cell in plan.cells()]
    done = [known[name] for name in names if name in known]
    outcomes = [table.judge(claim) for claim in plan.claims]
    svg, picture = drawing(table), f"{target.stem}.svg"
    alone = window(plan.checkpoint.trained // 4)
    documents = [
        d
        for d in plan.all_documents
        if table.losses(d, "rope", plan.shortest)
        and table.losses(d, plan.picture.minus, plan.shortest)
    ]
    text = fill(
        Path(__file__).with_name("lengths.md.jinja"),
        plan=plan,
        command=f"python -m experiments lengths {file}",
        folder=folder,
        done=len(done),
        count=len(names),
        hours=f"{sum(x.cpu_seconds + x.compile_seconds for x in done) / 3600:.1f}",
        picture=picture if svg else "",
        numbers=f"{target.stem}.csv",
        documents=len(documents),
        in_all=len(plan.all_documents),
        longest_documents=len(table.values("rope", "far", plan.longest)),
        probed=len(table.values("rope", "answer", plan.probe.contexts[0])),
        heads=heads(plan),
        rows=list(rows(table)),
        outcomes=[
            (title, [_claim(outcome) for outcome in outcomes if outcome.word == word])
            for word, title in _WORDS.items()
        ],
        not_run=sum(outcome.word == NOT_RUN for outcome in outcomes),
        least=LEAST,
        documents_of=[(name, ", ".join(kind.documents)) for name, kind in plan.kinds.items()],
        window=alone,
        alone=plus_minus(
            table.values(alone, "at", plan.checkpoint.trained, plan.picture.minus)
            if alone in plan.methods
            else [],
            "",
        ),
        peak=f"{max((x.peak_mib for x in done), default=0) / 2**10:.1f}",
        versions="; ".join(ordered(_versions(x.environment) for x in done)),
        processor="; ".join(ordered(str(x.environment.get("processor")) for x in done)),
        commits=", ".join(ordered(x.commit for x in done)),
    )
    pictures = {picture: svg} if svg else {}
    out = {
        target: text,
        target.with_suffix(".csv"): as_csv(list(numbers(table, outcomes))),
        folder / "report.html": as_html(text, pictures, os.path.relpath(target.parent, folder)),
    }
    return out | {target.with_name(name): plots.standalone(x) for name, x in pictures.items()}


_WORDS = {
    HOLDS: "Hold",
    FAILS: "Fail",
    NOT_RESOLVED: "Not resolved",
    GATE_FAILED: "Say nothing: RoPE copies nothing at the end of long texts, where all copies "
    "stand",
}


def _versions(environment: dict) -> str:
    return ", ".join(f"{name} {environment.get(name)}" for name in ("jax", "flax", "numpy"))


def _claim(outcome: Outcome) -> str:
    if outcome.word not in (FAILS, NOT_RESOLVED):
        return outcome.claim.claim
    # The condition that is farthest from its side of the threshold.
    by_sign = [
        (m.bounds[0] if m.condition.holds_at(-1.0) else -m.bounds[0], *m.bounds)
        for m in outcome.margins
    ]
    _, middle, low, high = max(by_sign)
    return f"{outcome.claim.claim} (off its limit by {middle:+.3f} [{low:+.3f}, {high:+.3f}])"


def columns(plan: Plan) -> list[tuple[str, str, int]]:
    """The losses of the table: head, view and length."""
    trained, target, longest = plan.checkpoint.trained, plan.shortest, plan.longest
    out = [(f"to {trained // 1024}k", "within", target)]
    for view, length in (("at", trained * 3 // 2), ("at", target), ("far", longest)):
        out.append((f"{(length - WIDTH) // 1024}-{length // 1024}k", view, length))
    return out


def heads(plan: Plan) -> list[str]:
    """The heads of the table."""
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
    for method in plan.methods:
        for view, length in keys:
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
        for margin in outcome.margins:
            middle, low, high = margin.bounds
            yield {
                "kind": "claim",
                "name": outcome.claim.claim,
                "view": margin.condition.text,
                "documents": str(outcome.count),
                "mean": f"{middle:.4f}",
                "low": f"{low:.4f}",
                "high": f"{high:.4f}",
                "outcome": outcome.word,
            }


def drawing(table: Table) -> str:
    """Returns the plot of losses by place minus the loss in a window with sinks; "" without any."""
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
    return plots.by_place(lines, BIN, trained, minus, "lengths") if lines else ""
