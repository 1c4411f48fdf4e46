"""Which memory remembers how far: every memory on Recall with delays of 10, 30 and 100, three seeds.

    python benchmarks/recall.py tune     # choose the learning rates on a tuning seed
    python benchmarks/recall.py run      # train with the chosen rates: 3 seeds, 3 delays; skips finished runs
    python benchmarks/recall.py collect  # runs -> benchmarks/recall/memories.csv
    python benchmarks/recall.py plot     # memories.csv -> docs/figures/recall-memories.png and recall-bptt.png
    python benchmarks/recall.py table    # memories.csv -> the table in benchmarks/README.md

Every memory learns from the same number of updates of the same number of whole episodes. The fast-weight memories are
trained with two kinds of keys: L2-normalised SiLU (with a high initial write strength: the bias of beta is 2) and, as
`-published`, the keys of their paper. The `-bptt1` variants let no gradient flow through the fast weights, as the
published code did; everything else is the same, and their learning rates are chosen in the same way.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).parent
RUNS = Path("runs/recall-memories")
TABLE = HERE / "recall" / "memories.csv"
RATES_FILE = HERE / "recall" / "rates.json"
FIGURES = HERE.parent / "docs" / "figures"

UPDATES, BATCH, BINS = 1000, 32, 50
DELAYS, SEEDS = (10, 30, 100), (0, 1, 2)
TUNING_SEED, TUNING_DELAYS = 100, (10, 30)
CHANCE = 0.25

BLOCK = ["--core.width", "64", "--core.layers", "1", "--core.feedforward", "128"]
FAST = {"linear-transformer": "Linear Transformer", "delta-net": "Delta Net"}
FAST |= {"recurrent-delta-net": "Recurrent Delta Net", "delta-rnn": "Delta RNN"}
LABELS = {"ff": "none", "lstm": "LSTM", "gru": "GRU", "gpt": "GPT"} | FAST
COLOURS = dict(zip(LABELS, plt.get_cmap("tab10").colors, strict=False))  # type: ignore
VARIANTS = [*LABELS, *(f"{name}-{how}" for how in ("bptt1", "published", "published-bptt1") for name in FAST)]


def core(variant: str, delay: int) -> list[str]:
    """The flags of a memory about 64 units wide that can hold the whole episode."""
    if variant == "ff":
        return ["core:ff"]
    if variant in ("lstm", "gru"):
        return [f"core:{variant}", "--core.hidden", "64", "--core.chrono", str(2 * delay)]
    if variant == "gpt":
        return ["core:gpt", *BLOCK, "--core.window", str(delay + 1), "--core.positions", "learned"]
    name = variant.removesuffix("-bptt1").removesuffix("-published")
    flags = [f"core:{name}", *BLOCK]
    if variant.endswith("-bptt1"):
        flags += ["--core.bptt", "1"]
    if "-published" not in variant:
        flags += ["--core.feature-map", "silu"]
        flags += ["--core.beta-bias", "2"] if name != "linear-transformer" else []
    return flags


def delays(variant: str) -> tuple[int, ...]:
    """All delays for the memories themselves; the variants are trained at the shorter two only."""
    return DELAYS if variant in LABELS else DELAYS[:2]


def candidate_rates(variant: str) -> tuple[float, ...]:
    """Learning rates to choose from; LSTM and GRU need larger ones."""
    return (1e-3, 2e-3, 5e-3, 1e-2) if variant in ("lstm", "gru") else (5e-4, 1e-3, 2e-3, 5e-3)


def run_directory(variant: str, delay: int, rate: float, seed: int) -> Path:
    return RUNS / f"{variant}-delay{delay}-lr{rate:g}-seed{seed}"


def frames(delay: int) -> int:
    return UPDATES * BATCH * (delay + 1)


def train(variant: str, delay: int, rate: float, seed: int) -> None:
    run = run_directory(variant, delay, rate, seed)
    if finished(run, delay):
        return
    flags = ["--run", str(run), "--seed", str(seed), "--env.delay", str(delay), "--algo.unroll", str(delay + 1)]
    flags += ["--frames", str(frames(delay)), "--algo.optimizer.lr", f"{rate:g}", "--runtime.threads", "1"]
    flags += ["--algo.trace-decay", "0.9", "--evaluation.every", "None", "--log.no-tensorboard", *core(variant, delay)]
    command = ["resume", str(run)] if (run / "experiment.json").exists() else ["train", "recall", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "bestiary", *command], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{run}: {done.stderr.strip() or done.stdout.strip()}")
    print(f"{run.name}: {curve(run, delay)[-1]:.2f} at the end", flush=True)


def finished(run: Path, delay: int) -> bool:
    """True when the evaluation after the last update exists."""
    path = run / "evaluations.csv"
    rows = path.read_text().split() if path.exists() else []
    return len(rows) > 1 and int(rows[-1].split(",")[0]) >= frames(delay)


def curve(run: Path, delay: int) -> np.ndarray:
    """Accuracy during training, in BINS equal parts of the budget."""
    sums, counts = np.zeros(BINS), np.zeros(BINS)
    with (run / "episodes.csv").open() as file:
        for row in csv.DictReader(file):
            b = min(BINS - 1, (int(row["frames"]) - 1) * BINS // frames(delay))
            sums[b] += float(row["score"])
            counts[b] += 1
    return sums / counts


def best_rate(variant: str) -> float:
    """The learning rate with the highest accuracy over all of training, on the tuning seed."""
    return max(
        candidate_rates(variant),
        key=lambda r: sum(curve(run_directory(variant, d, r, TUNING_SEED), d).mean() for d in TUNING_DELAYS),
    )


def rates() -> dict[str, float]:
    return json.loads(RATES_FILE.read_text())


def collect() -> None:
    with TABLE.open("w", newline="") as file:
        write = csv.writer(file, lineterminator="\n")
        write.writerow(["memory", "delay", "seed", "lr", "frames", "score"])
        for variant, rate in rates().items():
            for delay in delays(variant):
                for seed in SEEDS:
                    for b, score in enumerate(curve(run_directory(variant, delay, rate, seed), delay)):
                        at = (b + 1) * frames(delay) // BINS
                        write.writerow([variant, delay, seed, f"{rate:g}", at, f"{score:.4f}"])


Scores = dict[tuple[str, int], dict[int, list[float]]]  # (variant, delay) -> seed -> score in each bin


def read() -> Scores:
    curves: Scores = defaultdict(lambda: defaultdict(list))
    with TABLE.open() as file:
        for row in csv.DictReader(file):
            curves[row["memory"], int(row["delay"])][int(row["seed"])].append(float(row["score"]))
    return curves


def table() -> None:
    """Accuracy in the last tenth of training, seed by seed, and (in brackets) over all of training."""
    curves, last = read(), BINS // 10
    print(
        "| memory | learning rate | "
        + " | ".join(f"delay {d}" for d in DELAYS)
        + " |\n"
        + "|---" * (2 + len(DELAYS))
        + "|"
    )
    for variant, rate in rates().items():
        cells = []
        for delay in DELAYS:
            seeds = np.array(list(curves[variant, delay].values())) if delay in delays(variant) else np.zeros((0, BINS))
            ends = ", ".join(f"{x:.2f}" for x in seeds[:, -last:].mean(1))
            cells.append(f"{ends} ({seeds.mean():.2f})" if len(seeds) else "not run")
        print(f"| {variant} | {rate:g} | " + " | ".join(cells) + " |")


def plot() -> None:
    curves = read()

    def line(axes: plt.Axes, variant: str, delay: int, label: str, **style: object) -> None:
        seeds = np.array(list(curves[variant, delay].values()))
        x = (np.arange(BINS) + 0.5) / BINS * frames(delay) / 1e6
        axes.plot(x, seeds.mean(0), label=label, **style)  # type: ignore
        axes.fill_between(x, seeds.min(0), seeds.max(0), color=style["color"], alpha=0.15, linewidth=0)  # type: ignore

    def finish(figure: plt.Figure, axes: np.ndarray, path: Path) -> None:
        for ax in axes.flat:
            ax.axhline(CHANCE, color="grey", linestyle="--", linewidth=1)
            ax.set_ylim(0, 1.03)
            ax.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=120, bbox_inches="tight")

    figure, axes = plt.subplots(1, len(DELAYS), figsize=(11, 3.6), sharey=True, squeeze=False)
    for ax, delay in zip(axes[0], DELAYS, strict=True):
        for variant in LABELS:
            line(ax, variant, delay, LABELS[variant], color=COLOURS[variant])
        ax.set_title(f"delay {delay}", loc="left", fontsize=11)
        ax.set_xlabel("frames (millions)")
    axes[0, 0].set_ylabel("accuracy during training")
    figure.tight_layout()
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="upper center", ncol=8, frameon=False, bbox_to_anchor=(0.5, 0)
    )
    finish(figure, axes, FIGURES / "recall-memories.png")

    rows = [(keys, delay) for keys in ("-published", "") for delay in DELAYS[:2]]
    figure, axes = plt.subplots(len(rows), len(FAST), figsize=(11, 9), sharex="row", sharey=True)
    for i, (keys, delay) in enumerate(rows):
        for j, (name, label) in enumerate(FAST.items()):
            line(axes[i, j], name + keys, delay, "gradient through the whole episode", color="#0072B2")
            line(axes[i, j], f"{name}{keys}-bptt1", delay, "bptt=1, as published", color="#D55E00")
            if i == 0:
                axes[i, j].set_title(label, loc="left", fontsize=11)
        axes[i, 0].set_ylabel(f"{'published' if keys else 'SiLU'} keys\ndelay {delay}")
    for ax in axes[-1]:
        ax.set_xlabel("frames (millions)")
    figure.tight_layout()
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="upper center", ncol=2, frameon=False, bbox_to_anchor=(0.5, 0)
    )
    finish(figure, axes, FIGURES / "recall-bptt.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "run", "collect", "plot", "table"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one thread each")
    args = parser.parse_args()
    pool = ThreadPoolExecutor(args.jobs)
    if args.what == "tune":
        plan = [(v, d, r, TUNING_SEED) for v in VARIANTS for d in TUNING_DELAYS for r in candidate_rates(v)]
        list(pool.map(lambda job: train(*job), plan))
        RATES_FILE.write_text(json.dumps({v: best_rate(v) for v in VARIANTS}, indent=2) + "\n")
    elif args.what == "run":
        plan = [(v, d, r, s) for d in DELAYS for s in SEEDS for v, r in rates().items() if d in delays(v)]
        list(pool.map(lambda job: train(*job), plan))
    else:
        {"collect": collect, "plot": plot, "table": table}[args.what]()


if __name__ == "__main__":
    main()
