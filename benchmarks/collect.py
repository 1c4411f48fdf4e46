"""Collect the evaluations of finished runs in one table, and find out when each run solved its task for good.

    python benchmarks/collect.py TABLE.csv RUN...               # write TABLE.csv and print its summary
    python benchmarks/collect.py TABLE.csv                      # print the summary of an existing table
    python benchmarks/collect.py TABLE.csv RUN... --transfer    # results of `bestiary eval RUN --env.length N`

Seconds are counted from the start of the run, as in its metrics.csv; they include earlier evaluations.
"""

import argparse
import csv
import json
from itertools import groupby
from pathlib import Path

import numpy as np


def evaluation_rows(run: Path) -> list[dict[str, object]]:
    experiment = json.loads((run / "experiment.json").read_text())
    with (run / "metrics.csv").open() as file:
        times = [(float(row["frames"]), float(row["seconds"])) for row in csv.DictReader(file)]
    with (run / "evaluations.csv").open() as file:
        evaluations = list(csv.DictReader(file))
    return [
        {
            "task": run.name.rsplit("-", 1)[0],
            "seed": experiment["seed"],
            "frames": int(row["frames"]),
            "seconds": f"{np.interp(float(row['frames']), *zip(*times, strict=True)):.1f}",
            "score": f"{float(row['score']):.4g}",
            "success": f"{float(row['success']):.4g}",
        }
        for row in evaluations
    ]


def transfer_rows(run: Path) -> list[dict[str, object]]:
    """Evaluations in environments of another length than that of training."""
    found = [json.loads(path.read_text()) for path in run.glob("eval-*.json")]
    found = [e for e in found if e.get("env_changes")]
    trained = json.loads((run / "experiment.json").read_text())
    return [
        {
            "task": run.name.rsplit("-", 1)[0],
            "seed": trained["seed"],
            "trained": trained["env"]["length"],
            "evaluated": e["protocol"]["env"]["length"],
            "episodes": e["greedy"]["score"]["n"],
            "score": f"{e['greedy']['score']['mean']:.4g}",
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


def summary(table: Path, threshold: float) -> None:
    with table.open() as file:
        table_rows = list(csv.DictReader(file))
    print(f"| task | seed | success stays at {threshold} or more from | training time | last evaluation |")
    print("|---|---|---|---|---|")
    for (task, seed), group in groupby(table_rows, key=lambda row: (row["task"], row["seed"])):
        run = list(group)
        solved = len(run)  # index of the first evaluation from which success stays above the threshold
        while solved and float(run[solved - 1]["success"]) >= threshold:
            solved -= 1
        last = f"score {float(run[-1]['score']):.2f}, success {float(run[-1]['success']):.2f}"
        when = f"{int(run[solved]['frames']):,} frames, {float(run[solved]['seconds']):.0f} s" if run[solved:] else "-"
        print(f"| {task} | {seed} | {when} | {float(run[-1]['seconds']):.0f} s | {last} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--threshold", type=float, default=1.0, help="success rate that counts as solved")
    parser.add_argument(
        "--transfer", action="store_true", help="collect evaluations at other lengths than that of training"
    )
    args = parser.parse_args()
    if args.transfer:
        write(args.table, [row for run in args.runs for row in transfer_rows(run)])
        print(args.table.read_text())
        return
    if args.runs:
        write(args.table, [row for run in args.runs for row in evaluation_rows(run)])
    summary(args.table, args.threshold)


if __name__ == "__main__":
    main()
