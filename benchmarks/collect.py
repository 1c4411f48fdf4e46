"""Evaluations of finished runs in one table, and from when on each of them stayed solved.

    python benchmarks/collect.py TABLE.csv RUN...         # TABLE.csv, and the summary on the screen
    python benchmarks/collect.py TABLE.csv                # the summary of a table made before

Seconds are those since the run began, as its log counts them, with earlier evaluations in them.
"""

import argparse
import csv
import json
from itertools import groupby
from pathlib import Path

import numpy as np

COLUMNS = ("task", "seed", "frames", "seconds", "score", "success")


def rows(run: Path) -> list[dict[str, object]]:
    experiment = json.loads((run / "experiment.json").read_text())
    with (run / "metrics.csv").open() as file:
        log = [(float(row["frames"]), float(row["seconds"])) for row in csv.DictReader(file)]
    with (run / "evaluations.csv").open() as file:
        evaluations = list(csv.DictReader(file))
    return [
        {
            "task": run.name.rsplit("-", 1)[0],
            "seed": experiment["seed"],
            "frames": int(row["frames"]),
            "seconds": f"{np.interp(float(row['frames']), *zip(*log, strict=True)):.1f}",
            "score": f"{float(row['score']):.4g}",
            "success": f"{float(row['success']):.4g}",
        }
        for row in evaluations
    ]


def summary(table: Path, enough: float) -> None:
    with table.open() as file:
        everything = list(csv.DictReader(file))
    print(f"| task | seed | success stayed at {enough} or more from | of training | last evaluation |")
    print("|---|---|---|---|---|")
    for (task, seed), group in groupby(everything, key=lambda row: (row["task"], row["seed"])):
        run = list(group)
        stayed = len(run)
        while stayed and float(run[stayed - 1]["success"]) >= enough:
            stayed -= 1
        last = f"score {float(run[-1]['score']):.2f}, success {float(run[-1]['success']):.2f}"
        when = f"{int(run[stayed]['frames']):,} frames, {float(run[stayed]['seconds']):.0f} s" if run[stayed:] else "-"
        print(f"| {task} | {seed} | {when} | {float(run[-1]['seconds']):.0f} s | {last} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--enough", type=float, default=1.0, help="success that counts as solved")
    args = parser.parse_args()
    if args.runs:
        args.table.parent.mkdir(parents=True, exist_ok=True)
        with args.table.open("w", newline="") as file:
            write = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            write.writeheader()
            for run in args.runs:
                write.writerows(rows(run))  # type: ignore[arg-type]
    summary(args.table, args.enough)


if __name__ == "__main__":
    main()
