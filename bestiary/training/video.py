"""Videos of episodes: the rendered environment with the score, the step, the action and the command below it."""

import math
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
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
from bestiary.config.schema import Command
from bestiary.envs import EnvConfig
from bestiary.envs.env_batch import EnvBatch
from bestiary.errors import UserError
from bestiary.runtime.evaluation import build_agent
from bestiary.seeding import ACTIONS, EVAL, derive, substream
from bestiary.training.evaluation import acting_name, evaluation_experiment
from bestiary.training.run import Run
from bestiary.types import Episode, Mode, State, TimeStep

Image = NDArray[np.uint8]  # [height, width, RGB]

MIN_HEIGHT, MAX_WIDTH = 300, 1280  # small images are scaled up to this height, but not beyond this width
MIN_COLUMN, MAX_COLUMN = 84, 160  # width of a column of text, in pixels
CAPTION_HEIGHT, MARGIN = 46, 10
BACKGROUND, LABEL_COLOUR, TEXT_COLOUR = (24, 26, 30), (140, 146, 156), (240, 240, 240)


class RecordedVideo(NamedTuple):
    """A video file and the episodes that it shows."""

    file: Path
    episodes: list[Episode]


@dataclass(frozen=True)
class VideoSettings:
    """What a video shows, and how the agent chooses its actions."""

    out: Path | None = None
    """file that ends in .mp4; None: video-*.mp4 in the run directory"""
    episodes: int = 1
    """episodes, one after the other"""
    mode: Mode = "greedy"
    """greedy: the best action; sampled: an action sampled from the policy"""
    checkpoint: str | None = None
    """frames of a checkpoint, or last, or best; None: last"""
    seed: int = 0
    """seed of the episodes: those of an evaluation with this seed"""
    fps: float | None = None
    """steps shown per second; None: the environment's own speed"""
    scale: int | None = None
    """pixels of the video per pixel of the rendered image; None: as many as make small images visible"""
    epsilon: float = 0.0
    """probability that an action is replaced by a uniformly random one"""
    command: Command | None = None
    """for return-conditioned agents: desired return and horizon, such as 200,300; own: commands as the agent learnt
    them; None: as in the run's evaluations"""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto: a GPU if there is one"""
    env: EnvConfig | None = None
    """environment, if it is not the one of training: --env.length 100"""

    def __post_init__(self) -> None:
        if self.episodes < 1 or (self.fps is not None and self.fps <= 0) or (self.scale is not None and self.scale < 1):
            raise UserError(
                f"episodes={self.episodes} and scale={self.scale} must be at least 1, and fps={self.fps} positive"
            )
        if not 0 <= self.epsilon <= 1:
            raise UserError(f"epsilon={self.epsilon} must lie in [0, 1]")


# -- files --------------------------------------------------------------------------------------------------------


class Mp4:
    """Encodes images of one size with ffmpeg. The file appears under its name once it is complete."""

    def __init__(self, path: Path, fps: float) -> None:
        if path.suffix != ".mp4" or path.is_dir():
            raise UserError(f"{path} cannot be a video: give a file that ends in .mp4")
        self.path, self.fps = path, fps
        self.partial = path.with_name(f".{path.name}.writing")
        self.process: subprocess.Popen[bytes] | None = None
        self.complete = True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.partial.touch()
        except OSError as e:
            reason = "its directory is a file" if isinstance(e, FileExistsError) else e.strerror
            raise UserError(f"{path} cannot be written: {reason}") from None

    def add(self, image: Image) -> None:
        if self.process is None:
            self.process = self._start(*image.shape[:2])
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(np.ascontiguousarray(image).data)
        except BrokenPipeError:
            self._finish(self.process)

    def _start(self, height: int, width: int) -> subprocess.Popen[bytes]:
        from imageio_ffmpeg import get_ffmpeg_exe

        assert height % 2 == width % 2 == 0, "yuv420p stores colours for squares of four pixels"
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-framerate", str(self.fps)]
        codec = ["-c:v", "libx264", "-crf", "18", "-pix_fmt", "yuv420p", "-movflags", "+faststart", "-f", "mp4"]
        return subprocess.Popen(
            [get_ffmpeg_exe(), "-v", "error", "-y", *source, "-i", "-", "-an", *codec, f"file:{self.partial}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,  # a few words at most
            process_group=0,  # ffmpeg must not receive Ctrl-C: this process decides what becomes of the file
        )

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until ffmpeg has written the file; raise its error if it failed."""
        _, errors = process.communicate()
        if process.returncode != 0:
            lines = errors.decode(errors="replace").strip().splitlines()
            raise UserError(f"{self.path} cannot be written: {lines[0] if lines else 'ffmpeg was ended'}")

    def __enter__(self) -> "Mp4":
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None and self.complete and self.process is not None:
                self._finish(self.process)
                self.partial.replace(self.path)
        finally:
            if self.process is not None and self.process.poll() is None:
                self.process.kill()
                self.process.communicate()
            self.partial.unlink(missing_ok=True)


# -- images -------------------------------------------------------------------------------------------------------


def default_scale(height: int, width: int) -> int:
    """The integer factor by which an image is scaled up."""
    return max(1, min(math.ceil(MIN_HEIGHT / height), MAX_WIDTH // width))


def number(x: float) -> str:
    """212.30 -> 212.3, 140.00 -> 140"""
    text = f"{x:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


@cache
def font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def caption(values: dict[str, str], width: int) -> Image:
    """A line of small labels over large values. A value of several numbers takes as many columns."""
    from PIL import Image as PilImage
    from PIL import ImageDraw

    image = PilImage.new("RGB", (width, CAPTION_HEIGHT), BACKGROUND)
    draw = ImageDraw.Draw(image)
    columns = _columns(values)
    column_width = min(MAX_COLUMN, (width - 2 * MARGIN) / sum(columns))
    for i, (label, value) in enumerate(values.items()):
        x = MARGIN + column_width * sum(columns[:i])
        draw.text((x, 5), label, LABEL_COLOUR, font(12))
        draw.text((x, 19), value, TEXT_COLOUR, font(18))
    return np.asarray(image)


def _columns(values: dict[str, str]) -> list[int]:
    return [1 + value.count(",") for value in values.values()]


def video_frame(image: Image, values: dict[str, str], scale: int | None = None) -> Image:
    """The image, scaled up by an integer factor and centred over its caption. Height and width are even."""
    height, width, _ = image.shape
    scale = scale or default_scale(height, width)
    image = image.repeat(scale, 0).repeat(scale, 1)
    height, width, _ = image.shape
    frame_width = max(width, MIN_COLUMN * sum(_columns(values)) + 2 * MARGIN)
    frame_width += frame_width % 2
    frame = np.empty((height + height % 2 + CAPTION_HEIGHT, frame_width, 3), np.uint8)
    frame[:] = BACKGROUND
    left = (frame_width - width) // 2
    frame[:height, left : left + width] = image
    frame[-CAPTION_HEIGHT:] = caption(values, frame_width)
    return frame


# -- episodes -----------------------------------------------------------------------------------------------------


class VideoRecorder(AgentWrapper):
    """An agent whose time steps in the first environment become the frames of a video.

    A frame is written at the next step, which shows whether it was the last of its episode: that one lasts a second.
    """

    def __init__(self, agent: Agent, env_batch: EnvBatch, mp4: Mp4, episodes: int, scale: int | None) -> None:
        super().__init__(agent)
        self.env_batch, self.mp4 = env_batch, mp4
        self.episodes, self.scale = episodes, scale
        self.episode = self.steps = 0
        self.score = 0.0
        self.pending: tuple[Image, dict[str, str]] | None = None

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        action, aux, state = self.agent.act(step, state, explore, rng)
        if self.episode <= self.episodes:
            self._record(step, int(action[0]), aux)
        return action, aux, state

    def _record(self, step: TimeStep, action: int, aux: dict[str, Tensor]) -> None:
        is_first = bool(step.is_first[0])
        self._write(last=is_first)
        self.episode += is_first
        if self.episode > self.episodes:
            return
        self.steps = 0 if is_first else self.steps + 1
        self.score = 0.0 if is_first else self.score + float(step.reward[0])
        values = {"episode": f"{self.episode} of {self.episodes}"} if self.episodes > 1 else {}
        values |= {"score": number(self.score), "step": str(self.steps), "action": str(action)}
        info = self.agent.episode_info(aux)  # for return-conditioned agents: desired return and horizon
        values |= {name.replace("_", " "): number(x[0].item()) for name, x in info.items()}
        self.pending = self.env_batch.render(0), values

    def _write(self, last: bool) -> None:
        if self.pending is None:
            return
        (image, values), self.pending = self.pending, None
        if last:
            values["action"] = "-"  # the environment ignores it
        frame = video_frame(image, values, self.scale)
        for _ in range(math.ceil(self.mp4.fps) if last else 1):
            self.mp4.add(frame)


def record_video(
    experiment: Experiment,
    weights: dict[str, Tensor],
    device: torch.device,
    path: Path,
    cfg: VideoSettings,
    threads: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Episode]:
    """Record episodes in an environment of their own. If `stop` cancels it, some are missing and there is no file."""
    # the stream of `evaluate` with the same seed, so that the episodes are the same
    stream = substream(EVAL, cfg.seed, 0)
    env_batch = experiment.env.make(1, experiment.seed, stream, threads or cores())
    try:
        if threads is None:  # not chosen by the caller
            set_threads(None, env_batch.spec)
        env_fps = env_batch.start_rendering()
        with torch.random.fork_rng(devices=[]):  # initialising a network must not advance training's random numbers
            agent = build_agent(experiment, env_batch.spec, weights, device, cfg.command)
        agent = EpsilonGreedyAgent(agent, cfg.epsilon, env_batch.spec.num_actions) if cfg.epsilon else agent
        rng = torch.Generator(device).manual_seed(derive(experiment.seed, stream, ACTIONS))
        with Mp4(path, cfg.fps or env_fps) as mp4:
            recorder = VideoRecorder(agent, env_batch, mp4, cfg.episodes, cfg.scale)
            episodes = play_episodes(recorder, env_batch, cfg.episodes, cfg.mode, rng, stop=stop)
            mp4.complete = len(episodes) == cfg.episodes
        return episodes
    finally:
        env_batch.close()


def check_video(env: EnvConfig, seed: int) -> None:
    """Raise UserError if videos of an environment cannot be recorded, before training starts."""
    check_ffmpeg()
    env_batch = env.make(1, seed, EVAL, 1)
    try:
        env_batch.start_rendering()
        env_batch.reset()
        env_batch.render(0)
    finally:
        env_batch.close()


def check_ffmpeg() -> None:
    for module in ("imageio_ffmpeg", "PIL"):
        require(module, "video")
    from imageio_ffmpeg import get_ffmpeg_exe

    try:
        get_ffmpeg_exe()
    except RuntimeError as e:  # the package has no ffmpeg for this machine
        raise UserError(f"videos need ffmpeg: {e}") from None


def video(run: Run | Path | str, out: Path | str | None = None, **settings: Any) -> RecordedVideo:
    """Record episodes of a run's agent as a video: those that `evaluate` with the same seed plays.

    `settings` are fields of `VideoSettings`: `video(run, episodes=2, mode="sampled")`. Without `out` the file is
    video-*.mp4 in the run directory.
    """
    cfg = VideoSettings(None if out is None else Path(out), **settings)
    check_ffmpeg()
    run = run if isinstance(run, Run) else Run(run)
    experiment, env_changes = evaluation_experiment(run.experiment(), cfg.env)
    saved = run.load(cfg.checkpoint)
    mode = "" if cfg.mode == "greedy" else f"-{cfg.mode}"
    acting = acting_name(cfg.epsilon, cfg.command, env_changes)
    path = cfg.out or run.path / f"video-{saved.meta['frames']}-seed{cfg.seed}{mode}{acting}.mp4"
    tune_malloc()
    episodes = record_video(experiment, saved.weights, choose_device(cfg.device), path, cfg)
    return RecordedVideo(path, episodes)
