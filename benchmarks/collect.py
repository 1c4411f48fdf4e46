"""Evaluations of finished runs in one table, and from when on each of them stayed solved.

    python benchmarks/collect.py TABLE.csv RUN...         # TABLE.csv, and the summary on the screen
    python benchmarks/collect.py TABLE.csv                # the summary of a table made before
    python benchmarks/collect.py TABLE.csv RUN... --elsewhere    # what `bestiary eval RUN --env.length N` found

Seconds are those since the run began, as its log counts them, with earlier evaluations in them.
"""

import argparse
import csv
import json
from itertools import groupby
from pathlib import Path

import numpy as np


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


def elsewhere(run: Path) -> list[dict[str, object]]:
    """Games of lengths the run was not trained at."""
    found = [json.loads(path.read_text()) for path in run.glob("eval-*.json")]
    found = [e for e in found if e.get("elsewhere")]
    trained = json.loads((run / "experiment.json").read_text())
    return [
        {
            "task": run.name.rsplit("-", 1)[0],
            "seed": trained["seed"],
            "trained": trained["env"]["length"],
            "played": e["protocol"]["env"]["length"],
            "games": e["greedy"]["game"]["n"],
            "score": f"{e['greedy']['game']['mean']:.4g}",
            "success": f"{e['greedy']['success']['mean']:.4g}",
        }
        for e in sorted(found, key=lambda e: e["protocol"]["env"]["length"])
    ]


def write(table: Path, found: list[dict[str, object]]) -> None:
    table.parent.mkdir(parents=True, exist_ok=True)
    with table.open("w", newline="") as file:
        lines = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        lines.writeheader()
        lines.writerows(found)  # type: ignore[arg-type]


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
    parser.add_argument("--elsewhere", action="store_true", help="games at other lengths than trained")
    args = parser.parse_args()
    if args.elsewhere:
        write(args.table, [row for run in args.runs for row in elsewhere(run)])
        print(args.table.read_text())
        return
    if args.runs:
        write(args.table, [row for run in args.runs for row in rows(run)])
    summary(args.table, args.enough)


if __name__ == "__main__":
    main()
