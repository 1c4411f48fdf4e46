"""UDRL and RCP on LunarLander: comparison with the published results, and an ablation of our settings.

    python benchmarks/lunar_lander.py tracks     # five seeds of each preset, 100 test episodes each; resumes
    python benchmarks/lunar_lander.py ablate     # settings changed one by one, two seeds each
    python benchmarks/lunar_lander.py faithful   # the settings of the papers and of the public code
    python benchmarks/lunar_lander.py collect    # runs -> benchmarks/lunar-lander/*.csv
    python benchmarks/lunar_lander.py tables     # the CSV files -> the tables in benchmarks/README.md
    python benchmarks/lunar_lander.py draw       # the CSV files -> docs/figures/lunar-lander.png

The settings were chosen on earlier runs, some of seeds 25 to 27 and their test episodes: see benchmarks/README.md.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from bestiary.ops.stats import bootstrap_interval

HERE = Path(__file__).parent
RUNS = Path("runs/lunar-lander")
TABLES = HERE / "lunar-lander"
FIGURE = HERE.parent / "docs" / "figures" / "lunar-lander.png"

TRACKS = {"udrl": "UDRL", "udrl-sparse": "UDRL, sparse", "rcp-r": "RCP-R", "rcp-a": "RCP-A"}
PUBLISHED = {
    "udrl": (140, 172),
    "udrl-sparse": (158, 148),
    "rcp-r": (218, 194),
    "rcp-a": (203, 139),
}  # paper, code
SEEDS, ABLATED_SEEDS, EPISODES = "25..29", "30..31", 100

SHORT = {"rcp-a": "750k", "udrl": "1M"}  # environment steps of an ablation run
PARTS: dict[str, dict[str, list[str]]] = {
    "rcp-a": {
        "preset": [],
        "episodes truncated at 400 steps": ["--env.limit", "400"],
        "200 episodes stored, of any length": ["--algo.replay.max-transitions", "None"],
        "sampling uniform over episodes, not transitions": ["--algo.replay.sample-by", "episodes"],
        "observations not normalized": ["--algo.no-normalise"],
        "acting with the last weights, not their moving average": ["--algo.ema-decay", "None"],
        "command at the 50th percentile, not the 90th": ["--algo.command-percentile", "50"],
        "inverse temperature up to 2.5, not 1.6": ["--algo.max-inverse-temperature", "2.5"],
    },
    "udrl": {
        "preset": [],
        "command: mean return and mean length, not those of one episode": ["--algo.command-source", "uniform"],
        "command: return-to-go, not the episode return": ["--algo.command", "return-to-go"],
        "best 200 of the last 1000 episodes, not 70 of 350": [
            *("--algo.replay.capacity", "1000"),
            *("--algo.replay.best-episodes", "200", "--algo.replay.latest-episodes", "200"),
        ],
    },
}


FAITHFUL = {"udrl-paper": "1M", "udrl-repo": "1M", "rcp-r-repo": "250k", "rcp-a-repo": "250k"}  # environment steps
FAITHFUL_SEEDS = "25..26"


def bestiary(*command: str) -> None:
    subprocess.run([sys.executable, "-m", "bestiary", *command], check=True)


def train(preset: str, run: Path, seeds: str, *flags: str) -> None:
    known = ["--seeds", seeds, "--jobs", "2", "--run", str(run), "--log.no-tensorboard", *flags]
    bestiary("train", preset, *known)
    bestiary("eval", str(run), "--checkpoint", "best", "--episodes", str(EPISODES))


def part_of(preset: str, part: str) -> Path:
    return RUNS / "parts" / preset / "".join(c if c.isalnum() else "-" for c in part)


def tracks() -> None:
    for preset in TRACKS:
        train(preset, RUNS / preset, SEEDS)


def ablate() -> None:
    for preset, parts in PARTS.items():
        for part, flags in parts.items():
            train(preset, part_of(preset, part), ABLATED_SEEDS, "--frames", SHORT[preset], *flags)


def faithful() -> None:
    for preset, frames in FAITHFUL.items():
        train(preset, RUNS / preset, FAITHFUL_SEEDS, "--frames", frames, "--env.backend", "envpool")


# -- tables -----------------------------------------------------------------------------------------------------


def tested(run: Path) -> list[dict[str, Any]]:
    """Per seed, scores of the best checkpoint in episodes that had no part in choosing it."""
    path = run / f"eval-best-1x{EPISODES}-seed0.json"
    return json.loads(path.read_text())["seeds"] if path.exists() else []


def log(run: Path, name: str) -> list[dict[str, str]]:
    with (run / name).open() as file:
        return list(csv.DictReader(file))


def row_of(run: Path, seed: dict[str, Any]) -> dict[str, Any]:
    metrics = log(run / seed["run"], "metrics.csv")
    end = metrics[-1]
    when = np.interp(seed["checkpoint_frames"], *([float(m[k]) for m in metrics] for k in ("frames", "seconds")))
    return {
        "seed": seed["seed"],
        "greedy": f"{seed['greedy']['score']:.1f}",
        "sampled": f"{seed['sampled']['score']:.1f}",
        "frames": seed["checkpoint_frames"],
        "seconds": f"{when:.0f}",
        "trained_frames": end["frames"],
        "trained_seconds": f"{float(end['seconds']):.0f}",
        "updates_per_second": f"{float(end['updates']) / float(end['seconds']):.0f}",
    }


def write(name: str, rows: list[dict[str, Any]], order: list[str]) -> None:
    """Rows of tracks, presets and parts without a run here stay as they were collected before."""
    TABLES.mkdir(exist_ok=True)
    by = [*rows[0]][: [*rows[0]].index("seed")]
    new = {tuple(row[key] for key in by) for row in rows}
    before = log(TABLES, name) if (TABLES / name).exists() else []
    rows = [row for row in before if tuple(row[key] for key in by) not in new] + rows
    rows.sort(key=lambda row: order.index(row[by[0]]))
    with (TABLES / name).open("w", newline="") as file:
        lines = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        lines.writeheader()
        lines.writerows(rows)


def collect() -> None:
    ends, curves, parts = [], [], []
    others = [{"preset": p} | row_of(RUNS / p, seed) for p in FAITHFUL for seed in tested(RUNS / p)]
    for track in TRACKS:
        for seed in tested(RUNS / track):
            ends.append({"track": track} | row_of(RUNS / track, seed))
            for row in log(RUNS / track / seed["run"], "evaluations.csv"):
                score = f"{float(row['score']):.1f}"
                curves.append({"track": track, "seed": seed["seed"], "frames": row["frames"], "score": score})
    for preset, all_parts in PARTS.items():
        for part in all_parts:
            run = part_of(preset, part)
            parts += [{"preset": preset, "part": part} | row_of(run, seed) for seed in tested(run)]
    found = {"tracks.csv": ends, "curves.csv": curves, "parts.csv": parts, "faithful.csv": others}
    for name, rows in found.items():
        if rows:
            write(name, rows, [*TRACKS, *FAITHFUL])


def grouped(name: str, *by: str) -> dict[tuple[str, ...], list[dict[str, str]]]:
    groups: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for row in log(TABLES, name):
        groups[tuple(row[key] for key in by)].append(row)
    return groups


def tables() -> None:
    print("| track | paper / public code | mode | seeds 25 to 29 | mean | 95% interval | steps | minutes per seed |")
    print("|---" * 8 + "|")
    for (track,), seeds in grouped("tracks.csv", "track").items():
        minutes = np.mean([float(seed["trained_seconds"]) for seed in seeds]) / 60
        for mode in ("greedy", "sampled"):
            scores = np.array([float(seed[mode]) for seed in seeds])
            low, high = bootstrap_interval(scores)
            cells = [TRACKS[track], " / ".join(map(str, PUBLISHED[track])), mode, ", ".join(f"{x:.0f}" for x in scores)]
            cells += [f"{scores.mean():.1f}", f"[{low:.1f}, {high:.1f}]"]
            cells += [f"{int(seeds[0]['trained_frames']) / 1e6:.1f}M", f"{minutes:.1f}"]
            print("| " + " | ".join(cells) + " |")
    print("\n| preset | part | greedy, seeds 30 and 31 | sampled |")
    print("|---" * 4 + "|")
    for (preset, part), seeds in grouped("parts.csv", "preset", "part").items():
        print("| " + " | ".join([f"`{preset}`", part, *scores_of(seeds)]) + " |")
    print("\n| preset | steps | greedy, seeds 25 and 26 | sampled | minutes per seed |")
    print("|---" * 5 + "|")
    for (preset,), seeds in grouped("faithful.csv", "preset").items():
        steps = f"{int(seeds[0]['trained_frames']) / 1e6:.2f}".removesuffix("0") + "M"
        minutes = np.mean([float(seed["trained_seconds"]) for seed in seeds]) / 60
        print("| " + " | ".join([f"`{preset}`", steps, *scores_of(seeds), f"{minutes:.1f}"]) + " |")


def scores_of(seeds: list[dict[str, str]]) -> list[str]:
    return [", ".join(f"{float(seed[mode]):.0f}" for seed in seeds) for mode in ("greedy", "sampled")]


def draw() -> None:
    curves = grouped("curves.csv", "track", "seed")
    tracks = [track for track in TRACKS if any(key[0] == track for key in curves)]
    figure, axes = plt.subplots(1, len(tracks), figsize=(3.2 * len(tracks), 3.2), sharey=True, squeeze=False)
    for ax, track in zip(axes[0], tracks, strict=True):
        for (name, _), rows in curves.items():
            if name == track:
                frames, score = ([float(row[key]) for row in rows] for key in ("frames", "score"))
                ax.plot(np.array(frames) / 1e6, score, color="tab:blue", alpha=0.7, linewidth=1.3)
        for value, style, label in zip(PUBLISHED[track], ("--", ":"), ("paper", "public code"), strict=True):
            ax.axhline(value, color="grey", linestyle=style, linewidth=1, label=label)
        ax.set_title(TRACKS[track], loc="left", fontsize=11)
        ax.set_xlabel("environment steps (millions)")
        ax.set_ylim(-200, 300)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("score in evaluations")
    axes[0, 0].legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    steps = {step.__name__: step for step in (tracks, ablate, faithful, collect, tables, draw)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=steps)
    steps[parser.parse_args().step]()
