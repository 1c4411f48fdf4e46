"""A study as one page that needs nothing else: pictures, tables and the doubts that belong to them, in report.html."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bestiary.reward_hacking.report.figures import proxies_of, size_label
from bestiary.reward_hacking.report.html import Html, count, el, interval, page, table, words
from bestiary.reward_hacking.report.sections import (
    PARAMETERS,
    Falls,
    Results,
    about_proxy,
    behaviour,
    cells,
    correlations,
    in_modes,
    search,
)
from bestiary.reward_hacking.statistics import Row, align_checkpoints, estimate, falls, run_means

FEW = 5  # seeds below which a bootstrap interval is little more than their range
FALLS = """
The split cuts the mean over seeds in two, each side at its own mean, where that leaves the least squared error.
Percentages are shares of bootstrap resamples of seeds that are cut there: a sharp change gathers in one place, a slope
spreads. The drop is the mean before less the mean after (above 0: a fall), with its interval over resamples. Some split
is always the best one, in noise too. So runs are also shuffled along the axis (checkpoints within each run, runs across
sizes), and only a fall that at most 5 % of the shuffles match counts as evidence. Neighbouring checkpoints of a run
resemble each other, which makes this comparison too ready to see a fall along frames. One split cannot show a rise and
then a fall: best to last is how far the last point lies below the best one, which is chosen for each seed by the other
seeds. It describes and proves nothing.
"""


def write_report(study: dict[str, Any], path: Path) -> None:
    """Write a study as one page: no file beside it, nothing from the net."""
    rows = align_checkpoints(study["rows"])
    parts = [*opening(study, rows), *setup(study)]
    if rows:
        results = search(rows, str(study["settings"].get("true", "")))
        parts += [*summary(results), *every_reward(results)]
        for proxy in proxies_of(rows):
            parts += about_proxy(results, proxy)
        parts += correlations(results, study["rewards"], study["step_correlation"])
        parts += behaviour(results, study["actions"])
    else:
        parts.append(el("p", "No run has results yet.", class_="warning"))
    parts += [*gallery(study["moments"]), *problems(study["problems"])]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(study["title"], *parts), encoding="utf-8")


def opening(study: dict[str, Any], rows: Sequence[Row]) -> list[Html]:
    sections = {"setup": "Settings"}
    if rows:
        sections |= {"summary": "Summary"} | {f"proxy-{i}": proxy for i, proxy in enumerate(proxies_of(rows))}
        sections |= {"correlation": "Correlation", "behaviour": "Behaviour"}
    sections |= {"moments": "Moments", "problems": "Problems"}
    runs, seeds = ({row[key] for row in rows} for key in ("run", "seed"))
    there = f"{study['date']}. {count(len(runs), 'run')}, {count(len(seeds), 'seed')}. Command: "
    parts = [
        el("h1", study["title"]),
        el("p", there, el("code", study["command"])),
        el("nav", *(el("a", name, href=f"#{key}") for key, name in sections.items())),
    ]
    if study["problems"]:
        link = el("a", count(len(study["problems"]), "problem"), href="#problems")
        parts.append(el("p", link, " came up: look there before you believe the figures.", class_="warning"))
    return parts


def setup(study: dict[str, Any]) -> list[Html]:
    settings = [[name.replace("_", "-"), words(value)] for name, value in study["settings"].items()]
    rewards = [[name, el("code", text)] for name, text in study["rewards"].items()]
    note = "The proxy is what a run is paid for. The true reward is measured, and paid for only where it is the proxy."
    return [
        el("h2", "Settings", id="setup"),
        table(["setting", "value"], settings, left=2),
        el("p", note),
        table(["reward", "what it pays per step"], rewards, left=2),
    ]


def summary(results: Results) -> list[Html]:
    """All groups in one table, how to read intervals, and in which searches a fall was found."""
    heading = el("h2", "Summary", id="summary")
    caption = (
        f"At the last checkpoint, {results.end:,} frames: means over games of a run, then over seeds; below them 95 % "
        "bootstrap intervals over seeds, where there are several. Trunk: parameters of the fully connected layers."
    )
    parts = in_modes(results.last, lambda rows, mode: summary_table(rows, f"{mode.capitalize()} policy. {caption}"))
    parts.append(intervals_note(results.last))
    behind = sorted({row["run"] for row in results.rows} - {row["run"] for row in results.last})
    if behind:
        text = f"Not at the last checkpoint, and therefore not in this table: {', '.join(behind)}."
        parts.append(el("p", text, class_="warning"))
    return [heading, *parts, *falls_found(results)]


def summary_table(rows: Sequence[Row], caption: str) -> Html:
    head = ["proxy", "width", "depth", "parameters", "trunk", "seeds", "proxy return", "true return", "steps per game"]
    body = []
    for proxy, (width, depth), _, group in cells(rows):
        counts = [f"{group[0][key]:,}" for key in ("parameters", "trunk_parameters")]
        means = [interval(estimate(run_means(group, key))) for key in ("proxy_return", "true_return", "steps")]
        body.append([proxy, width, depth, *counts, len(group), *means])
    return table(head, body, 1, caption)


def intervals_note(last: Sequence[Row]) -> Html:
    counts = [len(group) for *_, group in cells(last)]
    text = "Greedy takes the most probable action; sampled draws from the policy, as in training. "
    if max(counts) == 1:
        text += "There is a single seed: no interval can be given, and another seed may look quite different."
        return el("p", text, class_="note")
    text += "Intervals are about seeds: how far the mean would move with other seeds. "
    text += "Groups with a single seed have none. " if min(counts) == 1 else ""
    if min(counts) < FEW:
        text += (
            f"With fewer than {FEW} seeds an interval is little more than the range of the seeds, "
            "and holds the truth less often than 95 % of the time."
        )
    return el("p", text, class_="note")


def falls_found(results: Results) -> list[Html]:
    """How many searches there were, how many could tell, and what they found."""
    searches = [change for found in results.falls.values() for change in found.values()]
    able = [change for change in searches if change is not None and change.drop.low is not None]
    n = sum(falls(change) for change in able)
    text = "Does the true return fall, along parameters or along frames? "
    text += f"There is evidence of a fall in {n} of " if n else "No evidence of a fall in "
    text += count(len(searches), "search", "es")
    text += f"; {len(able)} of them had the seeds and points to tell. " if len(able) < len(searches) else ". "
    text += (
        "Were there none, one search in twenty along parameters would report one by chance, and more along frames. "
        if able
        else ""
    )
    named = [el("li", f"{p}, {mode}: {where(found)}") for (p, mode), found in results.falls.items() if where(found)]
    lines = [el("ul", *named)] if named else []
    return [el("p", text), *lines, el("details", el("summary", "How a fall is searched for"), el("p", FALLS))]


def where(found: Falls) -> str:
    """Along what the true return of a proxy falls."""
    by_frames = [change for along, change in found.items() if along != PARAMETERS]
    n = sum(falls(change) for change in by_frames)
    parts = ["along parameters"] if falls(found[PARAMETERS]) else []
    return ", ".join([*parts, *([f"along frames for {n} of {count(len(by_frames), 'size')}"] if n else [])])


def every_reward(results: Results) -> list[Html]:
    """The same games under all rewards, whatever the run was paid for."""
    names = list(dict.fromkeys(name for row in results.last for name in row["returns"]))
    if not names:
        return []

    def show(rows: list[Row], mode: str) -> Html:
        body = []
        for proxy, size, _, group in cells(rows):
            known = [[np.mean(row["returns"][name]) for row in group if name in row["returns"]] for name in names]
            body.append([proxy, size_label(size), len(group), *(interval(estimate(v)) if v else "–" for v in known)])
        caption = f"{mode.capitalize()} policy at the last checkpoint: return per game under every reward."
        return table(["trained on", "size", "seeds", *names], body, 2, caption)

    return [el("h3", "The same games under every reward"), *in_modes(results.last, show)]


def gallery(moments: Sequence[Row]) -> list[Html]:
    heading = el("h2", "Moments", id="moments")
    if not moments:
        none = "There are no moments to show: a moment is one where the proxy was served, and not by the true reward."
        return [heading, el("p", none)]
    note = (
        "From a greedy game of each size with the first seed: where the proxy was served most beyond the true reward. "
        "Such moments are picked. They show what can happen, not how often."
    )
    shown = [
        el(
            "figure",
            el("img", src=f"data:image/png;base64,{m['png']}", alt=m["caption"]),
            el("figcaption", el("strong", m["proxy"]), f" {m['caption']} ({m['run']})"),
        )
        for m in moments
    ]
    return [heading, el("p", note, class_="note"), el("div", *shown, class_="gallery")]


def problems(texts: Sequence[str]) -> list[Html]:
    heading = el("h2", "Problems", id="problems")
    if not texts:
        return [heading, el("p", "None were reported.")]
    return [heading, el("ul", *(el("li", text) for text in texts))]
