"""Reward-hacking study (Pan et al. 2022): does a more capable agent have a higher proxy return and a lower true return?

Trains every combination of reward proxy, network size and seed, evaluates every checkpoint under every reward of the
study, and writes a report with `bestiary.reward_hacking.report.page`.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bestiary.config.experiment import Experiment
from bestiary.config.extras import require
from bestiary.config.schema import decode, encode, kebab
from bestiary.envs.base import advice
from bestiary.envs.reward_components import file_name, format_reward
from bestiary.envs.riverraid import ACTIONS, Riverraid, reward_weights
from bestiary.errors import UserError
from bestiary.launch.executor import LOCAL, Executor, JobResult, finished, frames_trained, run_all
from bestiary.nets import Resnet, Shallow
from bestiary.reward_hacking.checkpoint_evaluation import evaluate_checkpoints
from bestiary.reward_hacking.report.page import write_report
from bestiary.reward_hacking.segments import find_segments
from bestiary.training.display import count, duration
from bestiary.training.run import Run

PLAN, STUDY, REPORT = "plan.json", "study.json", "report.html"
SETTINGS_ALIASES = {"games": "episodes"}  # in plans of earlier versions

Say = Callable[[str], None]


@dataclass(frozen=True)
class StudyPlan:
    """The settings of a study: a base experiment, and what is varied."""

    experiment: Experiment
    proxies: Sequence[str]  # training rewards
    widths: Sequence[int]  # units of the fully connected layers
    depths: Sequence[int]  # number of fully connected layers
    seeds: Sequence[int]
    checkpoints: int = 4  # evaluated per run, evenly spaced
    episodes: int = 10  # per checkpoint and mode
    true: str = "score"  # the true reward

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise UserError(f"episodes={self.episodes} must be at least 1")

    @property
    def rewards(self) -> dict[str, str]:
        """All rewards under which episodes are evaluated, as written and as weighted sums."""
        return {name: format_reward(reward_weights(name)) for name in dict.fromkeys([*self.proxies, self.true])}

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "frames": self.experiment.frames,
            "checkpoints": self.checkpoints,
            "episodes": self.episodes,
            "true": self.true,
        }


class StudyRun(NamedTuple):
    """One run of a study."""

    proxy: str
    width: int
    depth: int
    seed: int
    experiment: Experiment
    path: Path

    @property
    def name(self) -> str:
        return self.path.name


def plan_runs(plan: StudyPlan, root: Path) -> list[StudyRun]:
    """Every combination of the study. Invalid settings are refused here, before any training."""
    experiment = plan.experiment
    env, encoder = experiment.env, experiment.net.encoder
    if not isinstance(env, Riverraid):
        raise UserError(f"env:{kebab(type(env))} has no named rewards: a study needs env:riverraid")
    if not isinstance(encoder, Shallow | Resnet):
        raise UserError("a study varies the layers after the convolutions: choose net.encoder:shallow or resnet")
    if not (plan.proxies and plan.widths and plan.depths and plan.seeds):
        raise UserError("a study needs at least one proxy, width, depth and seed")
    if min(*plan.widths, *plan.depths) < 1 or plan.checkpoints < 1:
        raise UserError("widths, depths and checkpoints must be at least 1")
    milestones = tuple(experiment.frames * (k + 1) // plan.checkpoints for k in range(plan.checkpoints))
    runtime = replace(experiment.runtime, threads=experiment.runtime.threads or 1)
    runs = []
    for proxy, width, depth, seed in itertools.product(plan.proxies, plan.widths, plan.depths, plan.seeds):
        varied = replace(
            experiment,
            env=replace(env, reward=proxy),
            net=replace(experiment.net, encoder=replace(encoder, hidden_size=width, num_layers=depth)),
            checkpoint=replace(experiment.checkpoint, milestones=milestones),
            runtime=runtime,
            seed=seed,
        )
        name = f"{file_name(proxy)}-w{width}-d{depth}-seed{seed}"
        runs.append(StudyRun(proxy, width, depth, seed, varied, root / name))
    if len({run.path for run in runs}) < len(runs):
        raise UserError("every run of a study is unique: a proxy, width, depth or seed is named twice")
    return runs


def claim_directory(runs: Sequence[StudyRun], settings: dict[str, Any], root: Path) -> None:
    """Write the plan to an empty directory, or check that the directory holds a study with the same plan."""
    experiments = {run.name: encode(run.experiment) for run in runs}
    plan = json.loads(json.dumps({"settings": settings, "runs": experiments}))
    file = root / PLAN
    if file.exists():
        try:
            known = json.loads(file.read_text())
            known["settings"] = {SETTINGS_ALIASES.get(k, k): v for k, v in known["settings"].items()}
            decoded = {name: encode(decode(Experiment, data)) for name, data in known["runs"].items()}
            known["runs"] = json.loads(json.dumps(decoded))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{file} cannot be read; choose another --run") from None
        if known != plan:
            raise UserError(f"{root} holds a study with another plan; choose another --run, or repeat its settings")
        return
    if root.exists() and any(root.iterdir()):
        raise UserError(f"{root} is not empty and not a study; choose another --run")
    root.mkdir(parents=True, exist_ok=True)
    Run(root).write(PLAN, json.dumps(plan, indent=2))


def study(
    plan: StudyPlan,
    root: Path,
    jobs: int | None = None,
    command: str = "",
    say: Say = lambda text: None,
    stop: Callable[[], bool] = lambda: False,
    executor: Executor = LOCAL,
) -> Path | None:
    """Train, evaluate and write the report; finished parts are not repeated. None if stopped before the end."""
    for module, extra in (("matplotlib", "plot"), ("scipy", "report"), ("jinja2", "report")):
        require(module, extra)
    rewards = plan.rewards
    runs = plan_runs(plan, root)
    claim_directory(runs, plan.settings, root)
    warnings = dict.fromkeys(text for run in runs for text in advice(run.experiment.env, run.experiment.algo))
    for text in warnings:
        say(f"warning: {text}")
    problems = train_all(runs, jobs, say, stop, executor)
    trained = [run for run in runs if run.name not in problems]
    results = None if stop() else evaluate_all(plan, trained, say, stop)
    if results is None:
        return None
    data = {
        "title": f"Riverraid: {', '.join(plan.proxies)} against {plan.true}",
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "settings": plan.settings
        | {"seeds": len(plan.seeds), "environments": plan.experiment.runtime.envs}
        | conditions(plan.experiment),
        "rewards": rewards,
        "actions": list(ACTIONS),
        **results,
        "problems": [*warnings, *(f"{name}: {text}" for name, text in problems.items())],
    }
    Run(root).write(STUDY, json.dumps(data))
    write_report(data, root / REPORT)
    if problems:
        first = next(iter(problems.items()))
        raise UserError(
            f"{len(problems)} of {len(runs)} runs failed, the first: {': '.join(first)}; {root / REPORT} is about the "
            f"others, and --run {root} continues the study"
        )
    return root / REPORT


def conditions(experiment: Experiment) -> dict[str, Any]:
    """The settings that decide whether a reward can be hacked, and what reward the learner receives."""
    env = experiment.env
    assert isinstance(env, Riverraid)
    clip = getattr(experiment.algo, "reward_clip", "none")
    options = ("launch", "end_at_crash", "stall", "sticky", "time_limit_frames")
    return {"reward_clip": clip, "prev_reward": experiment.net.prev_reward} | {k: getattr(env, k) for k in options}


def train_all(
    runs: Sequence[StudyRun], jobs: int | None, say: Say, stop: Callable[[], bool], executor: Executor
) -> dict[str, str]:
    """Train the runs that are not finished, in parallel; returns the reasons of failed runs by name."""
    problems: dict[str, str] = {}
    workers = executor.max_workers(jobs, runs[0].experiment)
    done = sum(map(finished, runs))
    say(f"{len(runs)} runs, {done} finished; {workers} in parallel -> {runs[0].path.parent}")

    def report(ended: JobResult[StudyRun]) -> None:
        if ended.problem is not None:
            problems[ended.job.name] = ended.problem
            say(f"{ended.job.name} failed: {ended.problem}")
        else:
            say(f"{ended.job.name} finished in {duration(ended.seconds)}")

    def progress(running: list[StudyRun]) -> None:
        for run in running:
            say(f"{run.name}: frames {count(frames_trained(run.path))} of {count(run.experiment.frames)}")

    run_all(runs, workers, report, stop, progress, executor=executor, log=say)
    return problems


def evaluate_all(
    plan: StudyPlan, runs: Sequence[StudyRun], say: Say, stop: Callable[[], bool]
) -> dict[str, Any] | None:
    """Rows, correlations per step, and segments of all runs; None if stopped."""
    rows, correlations, segments = [], [], []
    for number, run in enumerate(runs, 1):
        for row in evaluate_checkpoints(run, plan.rewards, plan.true, plan.episodes, stop):
            correlation = row.pop("step_correlation")
            rows.append(row)
            if row["frames"] == plan.experiment.frames:
                group = {key: row[key] for key in ("proxy", "width", "depth", "seed", "mode")}
                correlations.append(group | {"pearson": correlation})
        if stop():
            return None
        say(f"evaluated {run.name} ({number} of {len(runs)})")
        if run.seed == plan.seeds[0]:
            segments += find_segments(run, plan.true, stop)
    return None if stop() else {"rows": rows, "step_correlation": correlations, "moments": segments}
