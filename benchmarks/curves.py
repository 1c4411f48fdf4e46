"""Draw learning curves of runs: python benchmarks/curves.py OUT.png LABEL=RUN[,RUN...] ... [--chance 0.25]

Each label is one line, the mean over its runs; the band spans the runs. Scores are binned by frames.
"""

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def scores(run: Path, edges: np.ndarray) -> np.ndarray:
    """Mean score of the games that ended in each bin, carried forward where none did."""
    with (run / "episodes.csv").open() as file:
        rows = [(int(r["frames"]), float(r["score"])) for r in csv.DictReader(file)]
    frames, score = np.array(rows).T
    bins = np.digitize(frames, edges) - 1
    means = np.array([score[bins == b].mean() if (bins == b).any() else np.nan for b in range(len(edges) - 1)])
    for b in range(1, len(means)):
        means[b] = means[b - 1] if np.isnan(means[b]) else means[b]
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("lines", nargs="+", metavar="LABEL=RUN[,RUN...]")
    parser.add_argument("--title", default="")
    parser.add_argument("--chance", type=float, help="a dashed line: what play without memory earns")
    parser.add_argument("--bins", type=int, default=60)
    args = parser.parse_args()

    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for colour, line in zip(COLOURS, args.lines, strict=False):
        label, _, paths = line.partition("=")
        runs = [Path(p) for p in paths.split(",")]
        last = max(int((r / "episodes.csv").read_text().rstrip().rsplit("\n", 1)[-1].split(",")[0]) for r in runs)
        edges = np.linspace(0, last + 1, args.bins + 1)
        curves = np.stack([scores(r, edges) for r in runs])
        middle = (edges[1:] + edges[:-1]) / 2 / 1e6
        axes.plot(middle, curves.mean(0), color=colour, label=label)
        if len(runs) > 1:
            axes.fill_between(middle, curves.min(0), curves.max(0), color=colour, alpha=0.2, linewidth=0)
    if args.chance is not None:
        axes.axhline(args.chance, color="grey", linestyle="--", linewidth=1, label="no memory, at best")
    axes.set_xlabel("frames (millions)")
    axes.set_ylabel("score while training")
    axes.set_title(args.title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.out, dpi=120)


if __name__ == "__main__":
    main()
