"""A fake training process: `python fake_run.py RUN [SECONDS_PER_EVALUATION]` writes the files of a run at once.

The score grows linearly to a value that depends only on the learning rate and the seed. Seed 13 fails. SIGTERM makes
the process save and exit; so does the end of its parent process.
"""

import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

SECONDS_PER_EVALUATION = "FAKE_RUN_SECONDS_PER_EVALUATION"  # environment variable


def value(experiment: dict[str, Any]) -> float:
    return math.exp(-((math.log10(experiment["algo"]["optimizer"]["lr"]) + 3) ** 2)) + 0.01 * (experiment["seed"] % 5)


def stop_with_the_parent() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def main(path: Path, seconds_per_evaluation: float) -> int:
    experiment = json.loads((path / "experiment.json").read_text())
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    threading.Thread(target=stop_with_the_parent, daemon=True).start()
    if experiment["seed"] == 13:
        raise ValueError("sensor unplugged")
    budget = experiment["frames"]
    every = experiment["evaluation"]["every"] or budget
    done = max((int(p.name) for p in path.glob("checkpoints/*")), default=0)
    lines = [f"{at},{value(experiment) * at / budget:.9g},\n" for at in range(every, done + 1, every)]
    (path / "evaluations.csv").write_text("frames,score,success\n" + "".join(lines))
    while done < budget and not signals:
        time.sleep(seconds_per_evaluation)
        done += every
        with (path / "evaluations.csv").open("a") as file:
            file.write(f"{done},{value(experiment) * done / budget:.9g},\n")
        with (path / "metrics.csv").open("a") as file:
            file.write(f"{done},1\n")
    (path / "checkpoints" / f"{done:012d}").mkdir(parents=True, exist_ok=True)
    return 143 if signals and done < budget else 0


if __name__ == "__main__":
    seconds = sys.argv[2] if len(sys.argv) > 2 else os.environ.get(SECONDS_PER_EVALUATION, "0")
    sys.exit(main(Path(sys.argv[1]), float(seconds)))
