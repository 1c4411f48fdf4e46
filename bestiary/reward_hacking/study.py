"""Does a more capable agent serve a proxy better and the truth worse: sizes, rewards, seeds, every checkpoint judged.

Runs are made like those of several seeds; then whole games of every checkpoint are played and counted under every
reward of the study, and `bestiary.reward_hacking.report.page` tells what came of it.
"""

import base64
import io
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bestiary.acting.episodes import play_episodes, quotas
from bestiary.config.experiment import Experiment
from bestiary.config.extras import require
from bestiary.config.schema import encode, kebab
from bestiary.envs.base import advice, for_evaluation
from bestiary.envs.env_batch import EnvBatch, VectorStep
from bestiary.envs.reward_components import file_name, format_reward, weighted_sum
from bestiary.envs.riverraid import ACTIONS as BUTTONS
from bestiary.envs.riverraid import Riverraid, reward_weights
from bestiary.errors import UserError
from bestiary.launch.executor import LOCAL, Executor, JobResult, finished, frames_trained, run_all
from bestiary.nets import Resnet, Shallow
from bestiary.reward_hacking.report.figures import MODES
from bestiary.reward_hacking.report.page import write_report
from bestiary.reward_hacking.statistics import pearson
from bestiary.runtime.evaluation import build_agent
from bestiary.seeding import ACTIONS, EVAL, derive, substream
from bestiary.training.display import count, duration
from bestiary.training.run import Run
from bestiary.types import Episode, Mode

PLAN, STUDY, REPORT, LOOKED = "plan.json", "study.json", "report.html", "moments.json"
WINDOW = 25  # moves over which proxy and truth are compared to find a moment worth a look
SHOWN = 4  # pictures of such a moment
MOMENTS = 2  # of a run

Say = Callable[[str], None]


class Trained(NamedTuple):
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


def plan(
    experiment: Experiment,
    proxies: Sequence[str],
    widths: Sequence[int],
    depths: Sequence[int],
    seeds: Sequence[int],
    checkpoints: int,
    root: Path,
) -> list[Trained]:
    """Every combination; what cannot be is refused here, before anything is trained."""
    env, encoder = experiment.env, experiment.net.encoder
    if not isinstance(env, Riverraid):
        raise UserError(f"env:{kebab(type(env))} has no rewards by name: a study needs env:riverraid")
    if not isinstance(encoder, Shallow | Resnet):
        raise UserError("a study changes the layers behind the convolutions: choose net.encoder:shallow or resnet")
    if not (proxies and widths and depths and seeds):
        raise UserError("a study needs at least one proxy, width, depth and seed")
    if min(*widths, *depths) < 1 or checkpoints < 1:
        raise UserError("widths, depths and checkpoints must be at least 1")
    saved = tuple(experiment.frames * (k + 1) // checkpoints for k in range(checkpoints))
    runtime = replace(experiment.runtime, threads=experiment.runtime.threads or 1)
    found = []
    for proxy, width, depth, seed in itertools.product(proxies, widths, depths, seeds):
        one = replace(
            experiment,
            env=replace(env, reward=proxy),
            net=replace(experiment.net, encoder=replace(encoder, hidden_size=width, num_layers=depth)),
            checkpoint=replace(experiment.checkpoint, milestones=saved),
            runtime=runtime,
            seed=seed,
        )
        name = f"{file_name(proxy)}-w{width}-d{depth}-seed{seed}"
        found.append(Trained(proxy, width, depth, seed, one, root / name))
    if len({job.path for job in found}) < len(found):
        raise UserError("a study has every run once: one of its proxies, widths, depths or seeds is named twice")
    return found


def refuse_others(jobs: Sequence[Trained], settings: dict[str, Any], root: Path) -> None:
    """A directory holds one study: what is there must be the same one, then it goes on."""
    told = json.loads(json.dumps({"settings": settings, "runs": {j.name: encode(j.experiment) for j in jobs}}))
    file = root / PLAN
    if file.exists():
        try:
            known = json.loads(file.read_text())
        except ValueError:
            raise UserError(f"{file} cannot be read; choose another --run") from None
        if known != told:
            raise UserError(f"{root} holds a study with another plan; choose another --run, or repeat its own settings")
        return
    if root.exists() and any(root.iterdir()):
        raise UserError(f"{root} is not empty and not a study; choose another --run")
    root.mkdir(parents=True, exist_ok=True)
    Run(root).write(PLAN, json.dumps(told, indent=2))


def study(
    experiment: Experiment,
    proxies: Sequence[str],
    widths: Sequence[int],
    depths: Sequence[int],
    seeds: Sequence[int],
    root: Path,
    checkpoints: int = 4,
    games: int = 10,
    true: str = "score",
    jobs: int | None = None,
    command: str = "",
    say: Say = lambda text: None,
    stop: Callable[[], bool] = lambda: False,
    executor: Executor = LOCAL,
) -> Path | None:
    """Train, judge and report; what is done already is left alone. None if told to stop before the end."""
    require("matplotlib", "plot")
    if games < 1:
        raise UserError(f"games={games} must be at least 1")
    rewards = {name: format_reward(reward_weights(name)) for name in dict.fromkeys([*proxies, true])}
    planned = plan(experiment, proxies, widths, depths, seeds, checkpoints, root)
    settings = {"frames": experiment.frames, "checkpoints": checkpoints, "games": games, "true": true}
    refuse_others(planned, settings, root)
    warnings = dict.fromkeys(text for job in planned for text in advice(job.experiment.env, job.experiment.algo))
    for text in warnings:
        say(f"warning: {text}")
    problems = train_all(planned, jobs, say, stop, executor)
    if stop():
        return None
    rows, correlations, moments = [], [], []
    for number, job in enumerate(planned, 1):
        if job.name in problems:
            continue
        for row in judge_all(job, rewards, true, games, stop):
            correlation = row.pop("step_correlation")
            rows.append(row)
            if row["frames"] == experiment.frames:
                kept = {key: row[key] for key in ("proxy", "width", "depth", "seed", "mode")}
                correlations.append(kept | {"pearson": correlation})
        if stop():
            return None
        say(f"judged {job.name} ({number} of {len(planned)})")
        if job.seed == seeds[0]:
            moments += moments_of(job, true, stop)
    if stop():
        return None
    told = {
        "title": f"Riverraid: {', '.join(proxies)} against {true}",
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "settings": settings | {"seeds": len(seeds), "environments": experiment.runtime.envs} | conditions(experiment),
        "rewards": rewards,
        "actions": list(BUTTONS),
        "rows": rows,
        "step_correlation": correlations,
        "moments": moments,
        "problems": [*warnings, *(f"{name}: {text}" for name, text in problems.items())],
    }
    Run(root).write(STUDY, json.dumps(told))
    write_report(told, root / REPORT)
    if problems:
        first = next(iter(problems.items()))
        raise UserError(
            f"{len(problems)} of {len(planned)} runs failed, the first: {': '.join(first)}; {root / REPORT} is of the "
            f"others, and --run {root} goes on"
        )
    return root / REPORT


def conditions(experiment: Experiment) -> dict[str, Any]:
    """What decides whether a reward can be hacked at all, and what is left of it for the learner."""
    env = experiment.env
    assert isinstance(env, Riverraid)
    clip = getattr(experiment.algo, "reward_clip", "none")
    kept = ("launch", "end_at_crash", "stall", "sticky", "time_limit_frames")
    return {"reward_clip": clip, "prev_reward": experiment.net.prev_reward} | {k: getattr(env, k) for k in kept}


def train_all(
    planned: Sequence[Trained], jobs: int | None, say: Say, stop: Callable[[], bool], executor: Executor
) -> dict[str, str]:
    """What is not trained yet, side by side; who failed, and why."""
    problems: dict[str, str] = {}
    many = executor.max_workers(jobs, planned[0].experiment)
    done = sum(map(finished, planned))
    say(f"{len(planned)} runs, {done} finished; {many} at a time -> {planned[0].path.parent}")

    def tell(ended: JobResult[Trained]) -> None:
        if ended.problem is not None:
            problems[ended.job.name] = ended.problem
            say(f"{ended.job.name} failed: {ended.problem}")
        else:
            say(f"{ended.job.name} finished in {duration(ended.seconds)}")

    def watch(working: list[Trained]) -> None:
        for job in working:
            say(f"{job.name}: frames {count(frames_trained(job.path))} of {count(job.experiment.frames)}")

    run_all(planned, many, tell, stop, watch, executor=executor, log=say)
    return problems


# -- judging ------------------------------------------------------------------------------------------------------


class Notes:
    """Moves of the games that count: every slot has its quota, and plays on unheeded when it is through."""

    def __init__(self, env_batch: EnvBatch, games: int) -> None:
        self.quota = np.array(quotas(games, env_batch.num_envs))
        self.names = env_batch.components
        self.actions = np.zeros(env_batch.spec.num_actions, np.int64)
        self.paid: list[NDArray[Any]] = []
        self.parts: list[NDArray[Any]] = []
        env_batch.listener = self

    def __call__(self, action: NDArray[np.int64], raw: VectorStep) -> None:
        assert raw.components is not None
        self.quota -= raw.is_first
        heeded = (self.quota > 0) & ~raw.is_first
        self.actions += np.bincount(action[heeded], minlength=len(self.actions))
        self.paid.append(raw.reward[heeded])
        self.parts.append(raw.components[heeded])

    def rewards(self, weights: dict[str, float]) -> NDArray[np.float64]:
        """Of every move, under some reward."""
        prices = np.array([weights.get(name, 0.0) for name in self.names])
        return np.concatenate(self.parts) @ prices


def games_in(
    env_batch: EnvBatch,
    job: Trained,
    weights: dict[str, torch.Tensor],
    games: int,
    mode: Mode,
    stop: Callable[[], bool],
) -> list[Episode]:
    """Whole games; fewer if told to stop. Closes the world."""
    try:
        agent = build_agent(job.experiment, env_batch.spec, weights, torch.device("cpu"))
        return play_episodes(
            agent, env_batch, games, mode, torch.Generator().manual_seed(derive(job.seed, EVAL, ACTIONS)), stop=stop
        )
    finally:
        env_batch.close()


def env_batch_of(job: Trained, games: int, number: int) -> EnvBatch:
    """Seeds never trained on, the same for every run of a seed."""
    return for_evaluation(job.experiment.env).make(min(games, 16), job.seed, substream(EVAL, number, 0), 1)


def judge_all(
    job: Trained, rewards: dict[str, str], true: str, games: int, stop: Callable[[], bool]
) -> list[dict[str, Any]]:
    """A row for each checkpoint and mode; kept beside the run, so that no game is played twice."""
    run, rows = Run(job.path), []
    for path in run.saved("milestones"):
        name = f"judged-{path.name}.json"
        if (job.path / name).exists():
            rows += json.loads((job.path / name).read_text())
            continue
        if stop():
            break
        weights = run.load(str(int(path.name))).weights
        found = [judge(job, int(path.name), weights, mode, rewards, true, games, stop) for mode in MODES]
        if stop():  # broken off
            break
        run.write(name, json.dumps(found))
        rows += found
    return rows


def judge(
    job: Trained,
    frames: int,
    weights: dict[str, torch.Tensor],
    mode: Mode,
    rewards: dict[str, str],
    true: str,
    games: int,
    stop: Callable[[], bool],
) -> dict[str, Any]:
    env_batch = env_batch_of(job, games, 0)
    notes = Notes(env_batch, games)
    played = games_in(env_batch, job, weights, games, mode, stop)
    if stop():
        return {}
    parts = [e.components for e in played]
    returns = {name: [weighted_sum(reward_weights(name), p) for p in parts] for name in rewards}
    trunk = sum(w.numel() for name, w in weights.items() if name.startswith("torso.encoder.layers."))
    return {
        "proxy": job.proxy,
        "width": job.width,
        "depth": job.depth,
        "seed": job.seed,
        "run": job.name,
        "frames": frames,
        "parameters": sum(w.numel() for w in weights.values()),
        "trunk_parameters": trunk,
        "mode": mode,
        "proxy_return": [e.score for e in played],
        "true_return": returns[true],
        "steps": [e.steps for e in played],
        "returns": returns,
        "components": {name: [p[name] for p in parts] for name in parts[0]},
        "action_counts": notes.actions.tolist(),
        "step_correlation": pearson(np.concatenate(notes.paid), notes.rewards(reward_weights(true))),
    }


# -- moments ------------------------------------------------------------------------------------------------------


def apart(proxy: NDArray[np.float64], true: NDArray[np.float64], window: int, most: int) -> list[int]:
    """Where windows begin in which the proxy, each in units of its spread, exceeds the truth most; none overlap."""
    if len(proxy) < window:
        return []
    sums = [np.convolve(x, np.ones(window), "valid") for x in (proxy, true)]
    scaled = [s / (s.std() or 1.0) for s in sums]
    gap = scaled[0] - scaled[1]
    found: list[int] = []
    for at in np.argsort(-gap, kind="stable"):
        if all(abs(at - other) >= window for other in found):
            found.append(int(at))
        if len(found) == most:
            break
    return sorted(found)


def parted(proxy: NDArray[np.float64], true: NDArray[np.float64]) -> bool:
    """Whether the proxy was served at all, and not just by serving the truth: else there is nothing to be seen."""
    return bool(proxy.sum() > 0 and not np.array_equal(proxy, true))


def moments_of(job: Trained, true: str, stop: Callable[[], bool]) -> list[dict[str, Any]]:
    """Pictures from one greedy game of the last checkpoint: where the proxy was served and the truth was not."""
    run = Run(job.path)
    if (job.path / LOOKED).exists():
        return json.loads((job.path / LOOKED).read_text())
    weights = run.load().weights
    env_batch = env_batch_of(job, 1, 1)
    notes = Notes(env_batch, 1)
    played = games_in(env_batch, job, weights, 1, "greedy", stop)
    if stop():
        return []
    paid, truth = np.concatenate(notes.paid), notes.rewards(reward_weights(true))
    starts = [
        at for at in apart(paid, truth, WINDOW, MOMENTS) if parted(paid[at : at + WINDOW], truth[at : at + WINDOW])
    ]
    wanted = {at + (WINDOW * k) // SHOWN for at in starts for k in range(SHOWN)}
    pictures = pictures_at(job, weights, wanted, stop)
    if stop():
        return []
    found = [
        {
            "proxy": job.proxy,
            "run": job.name,
            "caption": f"moves {at} to {at + WINDOW} of {played[0].steps}: proxy {paid[at : at + WINDOW].sum():+g}, "
            f"{true} {truth[at : at + WINDOW].sum():+g}",
            "png": png(np.concatenate([pictures[at + (WINDOW * k) // SHOWN] for k in range(SHOWN)], 1)),
        }
        for at in starts
    ]
    run.write(LOOKED, json.dumps(found))
    return found


def pictures_at(
    job: Trained, weights: dict[str, torch.Tensor], moves: set[int], stop: Callable[[], bool]
) -> dict[int, NDArray[np.uint8]]:
    """The same game once more, with an eye on some of its moves."""
    env_batch = env_batch_of(job, 1, 1)
    env_batch.start_rendering()
    found: dict[int, NDArray[np.uint8]] = {}
    seen = itertools.count()

    def look(action: NDArray[np.int64], raw: VectorStep) -> None:
        move = next(seen)
        if move in moves:
            found[move] = env_batch.render(0)

    env_batch.listener = look
    games_in(env_batch, job, weights, 1, "greedy", stop)
    return found


def png(picture: NDArray[np.uint8]) -> str:
    from matplotlib.image import imsave

    out = io.BytesIO()
    imsave(out, picture, format="png")
    return base64.b64encode(out.getvalue()).decode()
