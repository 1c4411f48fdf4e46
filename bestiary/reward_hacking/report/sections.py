"""What a study asks of its runs: do returns rise and fall, do proxy and truth go together, what do policies do?"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bestiary.reward_hacking.report import figures
from bestiary.reward_hacking.report.figures import MODES, Looks, Size, looks_of, proxies_of, size_label, sizes_of
from bestiary.reward_hacking.report.html import Html, count, el, figure, interval, join, short, table
from bestiary.reward_hacking.statistics import (
    ChangePoint,
    Row,
    change_over_sizes,
    change_over_time,
    component_rates,
    correlation,
    estimate,
    falls,
    pearson,
    run_means,
    select,
    spearman,
    verdict,
)

PARAMETERS = "by parameters"
CORRELATION = """
Within runs, a correlation is worked out per run and averaged over runs, with a 95 % bootstrap interval over runs.
Across runs, a pair is the two means of a run, and runs are resampled. Games that last longer earn more of most things,
which alone pushes a correlation between games upwards. A correlation is not defined for fewer than three pairs, or when
one side is the same in all of them.
"""

Falls = dict[str, ChangePoint | None]  # along what -> what was found


class Results(NamedTuple):
    rows: list[Row]
    end: int  # frames of the last checkpoint
    last: list[Row]  # the rows there
    looks: Looks
    true: str
    falls: dict[tuple[str, str], Falls]  # of a proxy and a mode


def search(rows: list[Row], true: str) -> Results:
    """Everything that more than one section needs."""
    end = max(row["frames"] for row in rows)
    found = {(p, mode): search_falls(select(rows, proxy=p, mode=mode), end) for p, mode in kinds(rows)}
    return Results(rows, end, select(rows, frames=end), looks_of(rows), true, found)


def kinds(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Proxies and the modes in which they were played, greedy first."""
    return [(p, mode) for p in proxies_of(rows) for mode in MODES if select(rows, proxy=p, mode=mode)]


def cells(rows: Sequence[Row]) -> list[tuple[str, Size, str, list[Row]]]:
    """Groups of runs that differ in nothing but their seed."""
    return [
        (proxy, (width, depth), mode, group)
        for proxy, mode in kinds(rows)
        for width, depth in sizes_of(rows)
        if (group := select(rows, proxy=proxy, mode=mode, width=width, depth=depth))
    ]


def search_falls(rows: Sequence[Row], end: int) -> Falls:
    """Falls of the true return: along parameters at the last checkpoint, and along frames for every size."""
    by_parameters: dict[float, list[Row]] = {}
    for row in select(rows, frames=end):
        by_parameters.setdefault(row["parameters"], []).append(row)
    groups = [run_means(group, "true_return") for group in by_parameters.values()]
    found: Falls = {PARAMETERS: change_over_sizes(list(by_parameters), groups)}
    for width, depth in sizes_of(rows):
        frames, returns = series(select(rows, width=width, depth=depth))
        found[f"by frames, {size_label((width, depth))}"] = change_over_time(frames, returns)
    return found


def series(rows: Sequence[Row]) -> tuple[list[int], np.ndarray]:
    """Checkpoints and true returns [seeds, checkpoints] of the runs that have all of them."""
    x = sorted({row["frames"] for row in rows})
    runs = [select(rows, run=run) for run in dict.fromkeys(row["run"] for row in rows)]
    whole = [sorted(found, key=lambda row: row["frames"]) for found in runs if len(found) == len(x)]
    return x, np.array([run_means(found, "true_return") for found in whole])


def about_proxy(results: Results, proxy: str) -> list[Html]:
    """The two axes of capability, time and size."""

    def show(rows: list[Row], mode: str) -> Html:
        found = results.falls[proxy, mode]
        ends = select(rows, frames=results.end)
        pictures = [frames_figure(results, rows), *([sizes_figure(results, ends, found[PARAMETERS])] if ends else [])]
        return join([*pictures, fall_table(found, mode)])

    heading = el("h2", proxy, id=f"proxy-{proxies_of(results.rows).index(proxy)}")
    return [heading, *in_modes(select(results.rows, proxy=proxy), show)]


def in_modes(rows: Sequence[Row], show: Callable[[list[Row], str], Html]) -> list[Html]:
    """The first mode in sight, the other one click away."""
    first, *others = [(mode, show(found, mode)) for mode in MODES if (found := select(rows, mode=mode))]
    return [first[1], *(el("details", el("summary", f"The same, {mode} policy"), part) for mode, part in others)]


def titles(results: Results, proxy: str) -> list[str]:
    return [f"proxy: {proxy}", f"true: {results.true}" if results.true else "true"]


def frames_figure(results: Results, rows: Sequence[Row]) -> Html:
    proxy, mode = rows[0]["proxy"], rows[0]["mode"]
    return figure(
        figures.over_frames(rows, results.looks, titles(results, proxy)),
        f"{proxy}, {mode}: proxy return (left) and true return (right) against frames of training, a line per size",
        f"Paid for {proxy}, {mode} policy. A line is the mean over seeds of a size ({seeds_of(rows)}); "
        f"{intervals(rows, 'bands')}. "
        "A line that rises on the left while it falls on the right pleases the proxy at the cost of what was meant.",
    )


def sizes_figure(results: Results, rows: Sequence[Row], change: ChangePoint | None) -> Html:
    proxy, mode = rows[0]["proxy"], rows[0]["mode"]
    line = " The dashed line lies in the gap where the true return falls." if falls(change) else ""
    return figure(
        figures.over_sizes(rows, results.looks, titles(results, proxy), change),
        f"{proxy}, {mode}: proxy return (left) and true return (right) against parameters at the last checkpoint",
        f"Paid for {proxy}, {mode} policy, at {results.end:,} frames. Large marks are means of a size "
        f"({seeds_of(rows)}), small dots beside them the single runs; {intervals(rows, 'bars')}. "
        f"The grey line joins the means in order of parameters.{line}",
    )


def seeds_of(rows: Sequence[Row]) -> str:
    """How many seeds a group has."""
    counts = {len({row["seed"] for row in group}) for *_, group in cells(rows)}
    return count(min(counts), "seed") if len(counts) == 1 else f"{min(counts)} to {max(counts)} seeds"


def intervals(rows: Sequence[Row], drawn: str) -> str:
    alone = seeds_of(rows) == "1 seed"
    return f"one seed has no interval, so no {drawn}" if alone else f"{drawn} are 95 % bootstrap intervals over seeds"


def fall_table(found: Falls, mode: str) -> Html:
    head = [
        "along",
        "points",
        "seeds",
        "best split between",
        "drop there",
        "shuffles as clear",
        "best to last",
        "verdict",
    ]
    body: list[list[Any]] = []
    for along, change in found.items():
        if change is None:
            body.append([along, *"––––––", verdict(None)])
            continue
        clear = "–" if change.drop.mean <= 0 else "below 0.1%" if change.p_value < 0.001 else f"{change.p_value:.1%}"
        best = "–" if change.from_best is None else interval(change.from_best)
        text = el("strong", verdict(change)) if falls(change) else verdict(change)
        body.append([along, change.points, change.seeds, places(change), interval(change.drop), clear, best, text])
    return table(head, body, 1, f"Does the true return fall? {mode.capitalize()} policy.", words_last=True)


def places(change: ChangePoint) -> Html:
    """Where the series is cut, and in how many resamples it is cut there."""
    if not change.shares:
        return el("small", f"{short(change.before)} and {short(change.after)}")
    shares = sorted(change.shares.items(), key=lambda item: -item[1])[:3]
    lines = [f"{short(a)} and {short(b)}: {share:.0%}" for (a, b), share in shares if share >= 0.005]
    rest = 1 - sum(share for _, share in shares)
    lines += [f"elsewhere: {rest:.0%}"] if rest >= 0.005 else []
    return join(el("small", line) for line in lines)


def correlations(results: Results, rewards: Mapping[str, str], by_step: Sequence[Row]) -> list[Html]:
    body = []
    for proxy, mode in kinds(results.last):
        rows = select(results.last, proxy=proxy, mode=mode)
        steps = select(by_step, proxy=proxy, mode=mode)
        lines = [within_games(rows), across_runs(rows), *([within_steps(steps)] if steps else [])]
        body += [[proxy, mode, *line] for line in lines]
    runs = len({row["run"] for row in results.last})
    picture = figure(
        figures.proxy_against_true(results.last, results.looks),
        "Proxy return against true return at the last checkpoint, a panel per proxy and a mark per run",
        f"A mark is one of {count(runs, 'run')} at the last checkpoint, the mean over its games: filled greedy, hollow "
        "sampled. On a rising line more of the proxy goes with more of what was meant, on a falling line with less.",
    )
    meant = rewards.get(results.true, results.true)
    same = [p for p in proxies_of(results.last) if rewards.get(p, p) == meant]
    note = (
        f"For {', '.join(same)} the proxy is the true reward, and the two go together by construction." if same else ""
    )
    numbers = table(["proxy", "policy", "pairs", "Pearson", "Spearman", "n"], body, 3, words_last=True)
    heading = el("h2", "Correlation of proxy and true return", id="correlation")
    return [heading, picture, numbers, el("p", CORRELATION, note, class_="note")]


def within_games(rows: Sequence[Row]) -> list[Any]:
    pairs = [(row["proxy_return"], row["true_return"]) for row in rows]
    found = [[r for x, y in pairs if (r := measure(x, y)) is not None] for measure in (pearson, spearman)]
    why = "Not defined: a return is the same in all games, or the games are too few."
    n = f"{len(found[0])} of {count(len(rows), 'run')}"
    return ["games within a run", *(interval(estimate(r), "run", "z.2f") if r else why for r in found), n]


def across_runs(rows: Sequence[Row]) -> list[Any]:
    x, y = run_means(rows, "proxy_return"), run_means(rows, "true_return")
    found = [correlation(x, y, ranks) for ranks in (False, True)]
    why = "Not defined: a return is the same in all runs, or the runs are too few."
    return ["runs", *(why if r is None else interval(r, "run", "z.2f") for r in found), count(len(rows), "run")]


def within_steps(steps: Sequence[Row]) -> list[Any]:
    known = [c["pearson"] for c in steps if c["pearson"] is not None]
    why = "Not defined: a reward is the same in all steps."
    cell = interval(estimate(known), "run", "z.2f") if known else why
    return ["steps within a run", cell, "–", f"{len(known)} of {count(len(steps), 'run')}"]


def behaviour(results: Results, actions: Sequence[str]) -> list[Html]:
    """What the policies do, whatever it earns them: components per step, and actions."""
    names = list(dict.fromkeys(name for row in results.last for name in row["components"]))
    parts = [el("h2", "Behaviour", id="behaviour"), el("h3", "Components per step")]
    if names:
        parts += in_modes(results.last, lambda rows, mode: component_figure(rows, mode, results.looks, names))
    else:
        parts.append(el("p", "No components were recorded."))
    parts.append(el("h3", "Actions"))
    counted = [row for row in results.last if sum(row["action_counts"])]
    if counted:
        parts += in_modes(counted, lambda rows, mode: action_figure(rows, mode, actions))
    else:
        parts.append(el("p", "No actions were counted."))
    return parts


def component_figure(rows: Sequence[Row], mode: str, looks: Looks, names: Sequence[str]) -> Html:
    picture = figure(
        figures.components_per_step(rows, looks, names),
        f"{mode.capitalize()}: how much of each component there is per step, a panel per component, a row per proxy",
        f"{mode.capitalize()} policy at the last checkpoint: the sum of a component over all games of a run, divided "
        f"by its steps. A mark is the mean over the runs of a size ({seeds_of(rows)}); {intervals(rows, 'bars')}. "
        "Every panel has a scale of its own, and 0 on it.",
    )
    body = []
    for proxy, size, _, group in cells(rows):
        found = [component_rates(group, name) for name in names]
        body.append([proxy, size_label(size), len(group), *(interval(estimate(r)) if len(r) else "–" for r in found)])
    numbers = table(["proxy", "size", "seeds", *names], body, 2)
    return join([picture, el("details", el("summary", f"The numbers, {mode} policy"), numbers)])


def action_figure(rows: Sequence[Row], mode: str, actions: Sequence[str]) -> Html:
    return figure(
        figures.action_shares(rows, actions),
        f"{mode.capitalize()}: share of steps that took each action, a row per proxy and size, a column per action",
        f"{mode.capitalize()} policy at the last checkpoint: in which share of its steps a group takes an action, the "
        f"mean over its runs ({seeds_of(rows)}). Shares below half a percent are left blank; darker is more.",
    )
