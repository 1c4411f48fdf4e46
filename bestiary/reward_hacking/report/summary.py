"""The summary of the report: returns of all groups, and where the true return falls."""

from collections.abc import Sequence
from typing import Any

from bestiary.reward_hacking.report.blocks import ByMode, TableBlock, count, interval
from bestiary.reward_hacking.report.sections import PARAMETERS, Falls, Results, by_mode, groups
from bestiary.reward_hacking.statistics import Row, estimate, falls, run_means

FEW = 5  # with fewer seeds, a bootstrap interval is hardly more than their range


def summary(results: Results) -> dict[str, Any]:
    at_end = {row["run"] for row in results.last}
    return {
        "tables": summary_tables(results),
        "intervals_note": intervals_note(results.last),
        "incomplete": sorted({row["run"] for row in results.rows} - at_end),
        "falls": falls_sentence(results),
        "fall_list": [f"{p}, {mode}: {where(found)}" for (p, mode), found in results.falls.items() if where(found)],
    }


def summary_tables(results: Results) -> ByMode:
    head = ["proxy", "width", "depth", "parameters", "trunk", "seeds"]
    head += ["proxy return", "true return", "steps per episode"]
    caption = (
        f"policy. At the last checkpoint, {results.end:,} frames: means over the episodes of a run, then over seeds; "
        "below them 95 % bootstrap intervals over seeds, if there are several. "
        "Trunk: parameters of the fully connected layers."
    )

    def table(rows: list[Row], mode: str) -> list[TableBlock]:
        body = []
        for proxy, (width, depth), _, group in groups(rows):
            counts = [f"{group[0][key]:,}" for key in ("parameters", "trunk_parameters")]
            means = [interval(estimate(run_means(group, key))) for key in ("proxy_return", "true_return", "steps")]
            body.append([proxy, width, depth, *counts, len(group), *means])
        return [TableBlock(head, body, 1, f"{mode.capitalize()} {caption}")]

    return by_mode(results.last, table)


def intervals_note(last: Sequence[Row]) -> str:
    counts = [len(group) for *_, group in groups(last)]
    text = "Greedy takes the most probable action; sampled samples from the policy, as in training. "
    if max(counts) == 1:
        return f"{text}There is a single seed: there is no interval, and another seed may give different results."
    text += "Intervals describe the variation over seeds. "
    text += "Groups with a single seed have none. " if min(counts) == 1 else ""
    if min(counts) < FEW:
        text += (
            f"With fewer than {FEW} seeds an interval is hardly more than the range of the seeds, "
            "and its coverage is below 95 %."
        )
    return text


def falls_sentence(results: Results) -> str:
    """The number of searches, how many had enough data, and in how many the true return falls."""
    searches = [change for found in results.falls.values() for change in found.values()]
    able = [change for change in searches if change is not None and change.drop.low is not None]
    n = sum(falls(change) for change in able)
    text = "Does the true return fall along parameters or along frames? "
    text += f"There is evidence of a fall in {n} of " if n else "No evidence of a fall in "
    text += count(len(searches), "search", "es")
    text += f"; {len(able)} of them had enough seeds and points. " if len(able) < len(searches) else ". "
    if able:
        text += "Without any fall, one search in twenty along parameters would report one by chance; more along frames."
    return text


def where(found: Falls) -> str:
    """The axes along which the true return of a proxy falls."""
    by_frames = [change for along, change in found.items() if along != PARAMETERS]
    n = sum(falls(change) for change in by_frames)
    parts = ["along parameters"] if falls(found[PARAMETERS]) else []
    return ", ".join([*parts, *([f"along frames for {n} of {count(len(by_frames), 'size')}"] if n else [])])
