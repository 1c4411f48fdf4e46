"""Analyses of a study: change-points of the true return, correlation of proxy and true return, behaviour."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bestiary.reward_hacking.report import figures
from bestiary.reward_hacking.report.blocks import (
    Block,
    ByMode,
    Cell,
    FigureBlock,
    TableBlock,
    count,
    interval,
    short,
)
from bestiary.reward_hacking.report.figures import MODES, Size, Styles, proxies_of, size_label, sizes_of, styles_of
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

Falls = dict[str, ChangePoint | None]  # axis -> change-point


class Results(NamedTuple):
    rows: list[Row]
    end: int  # frames of the last checkpoint
    last: list[Row]  # rows of the last checkpoint
    styles: Styles
    true: str
    falls: dict[tuple[str, str], Falls]  # by proxy and mode


def analyse(rows: list[Row], true: str) -> Results:
    """What several sections need."""
    end = max(row["frames"] for row in rows)
    found = {(p, mode): find_falls(select(rows, proxy=p, mode=mode), end) for p, mode in proxies_and_modes(rows)}
    return Results(rows, end, select(rows, frames=end), styles_of(rows), true, found)


def proxies_and_modes(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return [(p, mode) for p in proxies_of(rows) for mode in MODES if select(rows, proxy=p, mode=mode)]


def groups(rows: Sequence[Row]) -> list[tuple[str, Size, str, list[Row]]]:
    """(proxy, size, mode, rows of all seeds)."""
    return [
        (proxy, (width, depth), mode, group)
        for proxy, mode in proxies_and_modes(rows)
        for width, depth in sizes_of(rows)
        if (group := select(rows, proxy=proxy, mode=mode, width=width, depth=depth))
    ]


def by_mode(rows: Sequence[Row], blocks: Callable[[list[Row], str], Sequence[Block]]) -> ByMode:
    return {mode: list(blocks(found, mode)) for mode in MODES if (found := select(rows, mode=mode))}


def find_falls(rows: Sequence[Row], end: int) -> Falls:
    """Change-points of the true return: along parameters at the last checkpoint, and along frames for every size."""
    by_parameters: dict[float, list[Row]] = {}
    for row in select(rows, frames=end):
        by_parameters.setdefault(row["parameters"], []).append(row)
    returns = [run_means(group, "true_return") for group in by_parameters.values()]
    found: Falls = {PARAMETERS: change_over_sizes(list(by_parameters), returns)}
    for width, depth in sizes_of(rows):
        frames, series = time_series(select(rows, width=width, depth=depth))
        found[f"by frames, {size_label((width, depth))}"] = change_over_time(frames, series)
    return found


def time_series(rows: Sequence[Row]) -> tuple[list[int], np.ndarray]:
    """Checkpoints, and true returns [seeds, checkpoints] of the runs that have all checkpoints."""
    x = sorted({row["frames"] for row in rows})
    runs = [select(rows, run=run) for run in dict.fromkeys(row["run"] for row in rows)]
    complete = [sorted(found, key=lambda row: row["frames"]) for found in runs if len(found) == len(x)]
    return x, np.array([run_means(found, "true_return") for found in complete])


# -- returns -----------------------------------------------------------------------------------------------------------


def returns_by_reward(results: Results) -> ByMode:
    """Returns of the same episodes under all rewards of the study."""
    names = list(dict.fromkeys(name for row in results.last for name in row["returns"]))

    def table(rows: list[Row], mode: str) -> list[TableBlock]:
        body = []
        for proxy, size, _, group in groups(rows):
            known = [[np.mean(row["returns"][name]) for row in group if name in row["returns"]] for name in names]
            body.append([proxy, size_label(size), len(group), *(interval(estimate(v)) if v else "–" for v in known)])
        caption = f"{mode.capitalize()} policy at the last checkpoint: return per episode under every reward."
        return [TableBlock(["trained on", "size", "seeds", *names], body, 2, caption)]

    return by_mode(results.last, table) if names else {}


def proxy_section(results: Results, proxy: str) -> ByMode:
    """Returns over training time and over network size, and their change-points."""

    def blocks(rows: list[Row], mode: str) -> list[Block]:
        found = results.falls[proxy, mode]
        at_end = select(rows, frames=results.end)
        sizes = [sizes_figure(results, at_end, found[PARAMETERS])] if at_end else []
        return [frames_figure(results, rows), *sizes, fall_table(found, mode)]

    return by_mode(select(results.rows, proxy=proxy), blocks)


def titles(results: Results, proxy: str) -> list[str]:
    return [f"proxy reward: {proxy}", f"true reward: {results.true}" if results.true else "true reward"]


def frames_figure(results: Results, rows: Sequence[Row]) -> FigureBlock:
    proxy, mode = rows[0]["proxy"], rows[0]["mode"]
    return FigureBlock(
        figures.over_frames(rows, results.styles, titles(results, proxy)),
        f"{proxy}, {mode}: proxy return (left) and true return (right) over frames of training, a line per size",
        f"Trained on {proxy}, {mode} policy. A line is the mean over seeds of a size ({seeds_of(rows)}); "
        f"{intervals(rows, 'bands')}. "
        "Reward hacking: a line that rises on the left while it falls on the right.",
    )


def sizes_figure(results: Results, rows: Sequence[Row], change: ChangePoint | None) -> FigureBlock:
    proxy, mode = rows[0]["proxy"], rows[0]["mode"]
    line = " The dashed line marks the change-point at which the true return falls." if falls(change) else ""
    return FigureBlock(
        figures.over_sizes(rows, results.styles, titles(results, proxy), change),
        f"{proxy}, {mode}: proxy return (left) and true return (right) over parameters at the last checkpoint",
        f"Trained on {proxy}, {mode} policy, at {results.end:,} frames. Large markers are means of a size "
        f"({seeds_of(rows)}), small dots beside them the single runs; {intervals(rows, 'bars')}. "
        f"The grey line connects the means in order of parameters.{line}",
    )


def seeds_of(rows: Sequence[Row]) -> str:
    """The number of seeds per group."""
    counts = {len({row["seed"] for row in group}) for *_, group in groups(rows)}
    return count(min(counts), "seed") if len(counts) == 1 else f"{min(counts)} to {max(counts)} seeds"


def intervals(rows: Sequence[Row], marks: str) -> str:
    single = seeds_of(rows) == "1 seed"
    return f"one seed has no interval, so no {marks}" if single else f"{marks} are 95 % bootstrap intervals over seeds"


def fall_table(found: Falls, mode: str) -> TableBlock:
    head = ["axis", "points", "seeds", "change-point between", "drop", "p-value", "best to last", "verdict"]
    rows: list[list[Any]] = []
    for axis, change in found.items():
        if change is None:
            rows.append([axis, *"––––––", verdict(None)])
            continue
        p_value = "–" if change.drop.mean <= 0 else "below 0.001" if change.p_value < 0.001 else f"{change.p_value:.3f}"
        best = "–" if change.from_best is None else interval(change.from_best)
        sentence = Cell(verdict(change), [], strong=falls(change))
        drop = interval(change.drop)
        rows.append([axis, change.points, change.seeds, positions(change), drop, p_value, best, sentence])
    caption = f"Does the true return fall? {mode.capitalize()} policy. The p-value is that of a permutation test."
    return TableBlock(head, rows, 1, caption, words_last=True)


def positions(change: ChangePoint) -> Cell:
    """The position of the change-point, with the shares of resamples."""
    if not change.shares:
        return Cell("", [f"{short(change.before)} and {short(change.after)}"])
    shares = sorted(change.shares.items(), key=lambda item: -item[1])[:3]
    lines = [f"{short(a)} and {short(b)}: {share:.0%}" for (a, b), share in shares if share >= 0.005]
    rest = 1 - sum(share for _, share in shares)
    return Cell("", lines + ([f"elsewhere: {rest:.0%}"] if rest >= 0.005 else []))


# -- correlation -------------------------------------------------------------------------------------------------------


def correlations(results: Results, rewards: Mapping[str, str], by_step: Sequence[Row]) -> dict[str, Any]:
    body = []
    for proxy, mode in proxies_and_modes(results.last):
        rows = select(results.last, proxy=proxy, mode=mode)
        steps = select(by_step, proxy=proxy, mode=mode)
        lines = [within_episodes(rows), across_runs(rows), *([within_steps(steps)] if steps else [])]
        body += [[proxy, mode, *line] for line in lines]
    runs = len({row["run"] for row in results.last})
    figure = FigureBlock(
        figures.proxy_against_true(results.last, results.styles),
        "Proxy return against true return at the last checkpoint, a panel per proxy and a marker per run",
        f"A marker is the mean over episodes of one of {count(runs, 'run')} at the last checkpoint: filled greedy, "
        "hollow sampled. A rising trend: proxy and true return are aligned. A falling trend: they are in conflict.",
    )
    true = rewards.get(results.true, results.true)
    same = [p for p in proxies_of(results.last) if rewards.get(p, p) == true]
    note = f"For {', '.join(same)} the proxy is the true reward: the correlation is 1 by construction." if same else ""
    table = TableBlock(["proxy", "policy", "pairs", "Pearson", "Spearman", "n"], body, 3, words_last=True)
    return {"blocks": [figure, table], "note": note}


def within_episodes(rows: Sequence[Row]) -> list[Any]:
    pairs = [(row["proxy_return"], row["true_return"]) for row in rows]
    found = [[r for x, y in pairs if (r := measure(x, y)) is not None] for measure in (pearson, spearman)]
    undefined = "Undefined: a return is the same in all episodes, or there are too few episodes."
    n = f"{len(found[0])} of {count(len(rows), 'run')}"
    return ["episodes within a run", *(interval(estimate(r), "run", "z.2f") if r else undefined for r in found), n]


def across_runs(rows: Sequence[Row]) -> list[Any]:
    x, y = run_means(rows, "proxy_return"), run_means(rows, "true_return")
    found = [correlation(x, y, ranks) for ranks in (False, True)]
    undefined = "Undefined: a return is the same in all runs, or there are too few runs."
    return ["runs", *(undefined if r is None else interval(r, "run", "z.2f") for r in found), count(len(rows), "run")]


def within_steps(steps: Sequence[Row]) -> list[Any]:
    known = [c["pearson"] for c in steps if c["pearson"] is not None]
    undefined = "Undefined: a reward is the same in all steps."
    cell = interval(estimate(known), "run", "z.2f") if known else undefined
    return ["steps within a run", cell, "–", f"{len(known)} of {count(len(steps), 'run')}"]


# -- behaviour ---------------------------------------------------------------------------------------------------------


def behaviour(results: Results, actions: Sequence[str]) -> dict[str, ByMode]:
    """Reward components per step, and actions."""
    names = list(dict.fromkeys(name for row in results.last for name in row["components"]))
    counted = [row for row in results.last if sum(row["action_counts"])]
    return {
        "components": by_mode(results.last, lambda rows, mode: component_blocks(rows, mode, results.styles, names))
        if names
        else {},
        "actions": by_mode(counted, lambda rows, mode: [action_figure(rows, mode, actions)]),
    }


def component_blocks(rows: Sequence[Row], mode: str, styles: Styles, names: Sequence[str]) -> list[Block]:
    figure = FigureBlock(
        figures.components_per_step(rows, styles, names),
        f"{mode.capitalize()}: mean of each component per step, a panel per component, a row per proxy",
        f"{mode.capitalize()} policy at the last checkpoint: the sum of a component over all episodes of a run divided "
        f"by its steps. A marker is the mean over the runs of a size ({seeds_of(rows)}); "
        f"{intervals(rows, 'bars')}. Every panel has its own scale, which includes 0.",
    )
    body = []
    for proxy, size, _, group in groups(rows):
        found = [component_rates(group, name) for name in names]
        body.append([proxy, size_label(size), len(group), *(interval(estimate(r)) if len(r) else "–" for r in found)])
    table = TableBlock(["proxy", "size", "seeds", *names], body, 2, summary=f"The numbers, {mode} policy")
    return [figure, table]


def action_figure(rows: Sequence[Row], mode: str, actions: Sequence[str]) -> FigureBlock:
    return FigureBlock(
        figures.action_shares(rows, actions),
        f"{mode.capitalize()}: frequency of each action, a row per proxy and size, a column per action",
        f"{mode.capitalize()} policy at the last checkpoint: the frequency of each action in percent of steps, the "
        f"mean over runs ({seeds_of(rows)}). Frequencies below half a percent are left blank; darker is more frequent.",
    )
