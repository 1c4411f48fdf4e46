"""Games to look at: what a spectator sees, and beneath it the score, the step, the action and the command."""

import math
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary.acting.episodes import EpsilonGreedyAgent, play_episodes
from bestiary.algos.base import Agent, AgentWrapper
from bestiary.config.experiment import Experiment
from bestiary.config.extras import require
from bestiary.config.machine import choose_device, cores, set_threads, tune_malloc
from bestiary.envs import EnvConfig
from bestiary.envs.env_batch import EnvBatch
from bestiary.errors import UserError
from bestiary.runtime.evaluation import build_agent
from bestiary.seeding import ACTIONS, EVAL, derive, substream
from bestiary.training.evaluation import acting_name, evaluation_experiment
from bestiary.training.run import Run
from bestiary.types import Episode, Mode, State, TimeStep

Picture = NDArray[np.uint8]  # [height, width, RGB]

HIGH, WIDE = 300, 1280  # small pictures grow until they are so high, but not wider than this
NARROW, BROAD, STRIP, MARGIN = 84, 160, 46, 10  # columns of text and what is around them, in pixels
DARK, DIM, BRIGHT = (24, 26, 30), (140, 146, 156), (240, 240, 240)


class Filmed(NamedTuple):
    file: Path
    games: list[Episode]


# -- files --------------------------------------------------------------------------------------------------------


class Mp4:
    """Pictures of one size go to ffmpeg one at a time; the file gets its name once it is complete."""

    def __init__(self, path: Path, fps: float) -> None:
        if path.suffix != ".mp4" or path.is_dir():
            raise UserError(f"{path} cannot be a video: give a file that ends in .mp4")
        self.path, self.fps = path, fps
        self.aside = path.with_name(f".{path.name}.writing")
        self.process: subprocess.Popen[bytes] | None = None
        self.complete = True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.aside.touch()
        except OSError as e:
            reason = "its directory is a file" if isinstance(e, FileExistsError) else e.strerror
            raise UserError(f"{path} cannot be written: {reason}") from None

    def add(self, picture: Picture) -> None:
        if self.process is None:
            self.process = self._start(*picture.shape[:2])
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(np.ascontiguousarray(picture).data)
        except BrokenPipeError:
            self._finish(self.process)

    def _start(self, height: int, width: int) -> subprocess.Popen[bytes]:
        from imageio_ffmpeg import get_ffmpeg_exe

        assert height % 2 == width % 2 == 0, "colours are stored for squares of four pixels"
        shown = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-framerate", str(self.fps)]
        coded = ["-c:v", "libx264", "-crf", "18", "-pix_fmt", "yuv420p", "-movflags", "+faststart", "-f", "mp4"]
        return subprocess.Popen(
            [get_ffmpeg_exe(), "-v", "error", "-y", *shown, "-i", "-", "-an", *coded, f"file:{self.aside}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,  # a few words at most
            process_group=0,  # Ctrl-C is for us: what becomes of the file is decided here
        )

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        """No more pictures: wait for the rest of the file, or say what went wrong with it."""
        _, complaint = process.communicate()
        if process.returncode != 0:
            lines = complaint.decode(errors="replace").strip().splitlines()
            raise UserError(f"{self.path} cannot be written: {lines[0] if lines else 'ffmpeg was ended'}")

    def __enter__(self) -> "Mp4":
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None and self.complete and self.process is not None:
                self._finish(self.process)
                self.aside.replace(self.path)
        finally:
            if self.process is not None and self.process.poll() is None:
                self.process.kill()
                self.process.communicate()
            self.aside.unlink(missing_ok=True)


# -- pictures -----------------------------------------------------------------------------------------------------


def whole_scale(height: int, width: int) -> int:
    """By which whole number a picture grows to be seen well."""
    return max(1, min(math.ceil(HIGH / height), WIDE // width))


def number(x: float) -> str:
    """212.30 -> 212.3, 140.00 -> 140"""
    text = f"{x:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


@cache
def font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def strip(words: dict[str, str], width: int) -> Picture:
    """A line of small names over large values; a value of several parts gets as many columns."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, STRIP), DARK)
    draw = ImageDraw.Draw(image)
    columns = _columns(words)
    each = min(BROAD, (width - 2 * MARGIN) / sum(columns))
    for i, (name, value) in enumerate(words.items()):
        x = MARGIN + each * sum(columns[:i])
        draw.text((x, 5), name, DIM, font(12))
        draw.text((x, 19), value, BRIGHT, font(18))
    return np.asarray(image)


def _columns(words: dict[str, str]) -> list[int]:
    return [1 + value.count(",") for value in words.values()]


def frame(picture: Picture, words: dict[str, str], scale: int | None = None) -> Picture:
    """A picture grown by a whole number, centred over its words; height and width are even."""
    height, width, _ = picture.shape
    scale = scale or whole_scale(height, width)
    picture = picture.repeat(scale, 0).repeat(scale, 1)
    height, width, _ = picture.shape
    across = max(width, NARROW * sum(_columns(words)) + 2 * MARGIN)
    across += across % 2
    whole = np.empty((height + height % 2 + STRIP, across, 3), np.uint8)
    whole[:] = DARK
    left = (across - width) // 2
    whole[:height, left : left + width] = picture
    whole[-STRIP:] = strip(words, across)
    return whole


# -- games --------------------------------------------------------------------------------------------------------


class Filming(AgentWrapper):
    """Another agent, watched: what it sees in the first slot, and does there, becomes a frame.

    A frame is shown with the next row, which tells whether it was a game's last: that one stays for a second.
    """

    def __init__(self, agent: Agent, env_batch: EnvBatch, mp4: Mp4, episodes: int, scale: int | None) -> None:
        super().__init__(agent)
        self.env_batch, self.mp4 = env_batch, mp4
        self.episodes, self.scale = episodes, scale
        self.game = self.steps = 0
        self.score = 0.0
        self.waiting: tuple[Picture, dict[str, str]] | None = None

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        action, aux, state = self.agent.act(step, state, explore, rng)
        if self.game <= self.episodes:
            self._see(step, int(action[0]), aux)
        return action, aux, state

    def _see(self, step: TimeStep, action: int, aux: dict[str, Tensor]) -> None:
        begins = bool(step.is_first[0])
        self._show(last=begins)
        self.game += begins
        if self.game > self.episodes:
            return
        self.steps = 0 if begins else self.steps + 1
        self.score = 0.0 if begins else self.score + float(step.reward[0])
        words = {"game": f"{self.game} of {self.episodes}"} if self.episodes > 1 else {}
        words |= {"score": number(self.score), "step": str(self.steps), "action": str(action)}
        if "command" in aux:
            words["command"] = ", ".join(number(x) for x in aux["command"][0].flatten().tolist())
        self.waiting = self.env_batch.render(0), words

    def _show(self, last: bool) -> None:
        if self.waiting is None:
            return
        (picture, words), self.waiting = self.waiting, None
        if last:
            words["action"] = "-"  # none follows
        whole = frame(picture, words, self.scale)
        for _ in range(math.ceil(self.mp4.fps) if last else 1):
            self.mp4.add(whole)


def film(
    experiment: Experiment,
    weights: dict[str, Tensor],
    device: torch.device,
    path: Path,
    episodes: int = 1,
    mode: Mode = "greedy",
    seed: int = 0,
    fps: float | None = None,
    scale: int | None = None,
    epsilon: float = 0.0,
    command: tuple[float, ...] | None = None,
    threads: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Episode]:
    """Games one after the other, in a world of their own; fewer than asked for, and no file, if told to stop."""
    # the stream of `evaluate` with the same seed: the same games
    stream = substream(EVAL, seed, 0)
    env_batch = experiment.env.make(1, experiment.seed, stream, threads or cores())
    try:
        if threads is None:  # nobody has chosen yet
            set_threads(None, env_batch.spec)
        natural = env_batch.start_rendering()
        with torch.random.fork_rng(devices=[]):  # a new network draws from the stream that training draws from
            agent = build_agent(experiment, env_batch.spec, weights, device, command)
        agent = EpsilonGreedyAgent(agent, epsilon, env_batch.spec.num_actions) if epsilon else agent
        rng = torch.Generator(device).manual_seed(derive(experiment.seed, stream, ACTIONS))
        with Mp4(path, fps or natural) as mp4:
            games = play_episodes(
                Filming(agent, env_batch, mp4, episodes, scale), env_batch, episodes, mode, rng, stop=stop
            )
            mp4.complete = len(games) == episodes
        return games
    finally:
        env_batch.close()


def check_video(env: EnvConfig, seed: int) -> None:
    """Refuse what cannot be filmed, before anything is trained."""
    check_extra()
    env_batch = env.make(1, seed, EVAL, 1)
    try:
        env_batch.start_rendering()
        env_batch.reset()
        env_batch.render(0)
    finally:
        env_batch.close()


def check_extra() -> None:
    for module in ("imageio_ffmpeg", "PIL"):
        require(module, "video")
    from imageio_ffmpeg import get_ffmpeg_exe

    try:
        get_ffmpeg_exe()
    except RuntimeError as e:  # the package brings none for this machine
        raise UserError(f"videos need ffmpeg: {e}") from None


def video(
    run: Run | Path | str,
    out: Path | str | None = None,
    episodes: int = 1,
    mode: Mode = "greedy",
    checkpoint: str | None = None,
    seed: int = 0,
    fps: float | None = None,
    scale: int | None = None,
    epsilon: float = 0.0,
    device: str = "auto",
    env: EnvConfig | None = None,
    command: tuple[float, ...] | None = None,
) -> Filmed:
    """Film whole games of a run's agent, on seeds it was never trained on: those `evaluate` plays with the same seed.

    Writes video-*.mp4 into the run directory, or `out`. `fps` None: as fast as the environment is meant to be seen;
    `scale` None: small pictures grow by a whole number. The rest is as in `evaluate`.
    """
    if episodes < 1 or (fps is not None and fps <= 0) or (scale is not None and scale < 1):
        raise UserError(f"episodes={episodes} and scale={scale} must be at least 1, and fps={fps} positive")
    if not 0 <= epsilon <= 1:
        raise UserError(f"epsilon={epsilon} must lie in [0, 1]")
    check_extra()
    run = run if isinstance(run, Run) else Run(run)
    experiment, changed = evaluation_experiment(run.experiment(), env)
    saved = run.load(checkpoint)
    kind = ("" if mode == "greedy" else f"-{mode}") + acting_name(epsilon, command, changed)
    path = Path(out) if out else run.path / f"video-{saved.meta['frames']}-seed{seed}{kind}.mp4"
    tune_malloc()
    where = choose_device(device)
    games = film(experiment, saved.weights, where, path, episodes, mode, seed, fps, scale, epsilon, command)
    return Filmed(path, games)
