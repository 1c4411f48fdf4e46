"""Videos: every environment can be rendered, episodes are recorded to files, and learning is not affected."""

import csv
import math
import re
import shlex
import typing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.settings import configure

import bestiary
from bestiary.algos.base import Agent
from bestiary.cli import main
from bestiary.cli.commands.train import read as read_training
from bestiary.cli.commands.video import VideoCommand, read
from bestiary.cli.parse import parse
from bestiary.config import extras
from bestiary.config.experiment import Evaluation, Experiment, Logs, Video
from bestiary.config.extras import MissingExtra
from bestiary.envs import Atari, Catch, EnvConfig, Gym, LunarLander, Recall, TMaze
from bestiary.envs.batched import VectorEnvBatch
from bestiary.envs.catch import CatchEnv
from bestiary.errors import UserError
from bestiary.training import video
from bestiary.training.display import NullDisplay
from bestiary.training.run import Run
from bestiary.training.session import Session, iterate
from bestiary.training.video import (
    CAPTION_HEIGHT,
    Mp4,
    VideoRecorder,
    VideoSettings,
    caption,
    default_scale,
    number,
    video_frame,
)

ffmpeg = pytest.importorskip("imageio_ffmpeg")
pytest.importorskip("PIL")

FAMILIES = [*(cls() for cls in typing.get_args(EnvConfig)), LunarLander(sparse=True), Gym("bestiary/Catch-v0")]
FAMILIES += [TMaze(length=3, active=True)]
SMALL = replace(
    bestiary.preset("recall"),
    frames=2_000,
    evaluation=Evaluation(episodes=0),
    log=Logs(every=500, tensorboard=False),
)
SMALL = replace(SMALL, algo=configure(SMALL.algo, batch_size=4), runtime=replace(SMALL.runtime, envs=4, threads=1))


def env_batch_of(env, num_envs=1):
    try:
        return env.make(num_envs, 0, 1, 1)
    except MissingExtra as e:
        pytest.skip(str(e))


def random_steps(env_batch, count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield env_batch.step(torch.from_numpy(rng.integers(0, env_batch.spec.num_actions, env_batch.num_envs)))


def read_back(path):
    """The metadata and the images of a video file."""
    frames = ffmpeg.read_frames(path)
    metadata = next(frames)
    width, height = metadata["size"]
    return metadata, [np.frombuffer(f, np.uint8).reshape(height, width, 3) for f in frames]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return bestiary.train(SMALL, tmp_path_factory.mktemp("runs") / "recall")


# -- images ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", FAMILIES, ids=repr)
def test_every_environment_renders_images_that_change_with_its_state(env):
    env_batch = env_batch_of(env, 2)
    try:
        assert 1 <= env_batch.start_rendering() <= 120
        env_batch.reset()
        first = env_batch.render(1)
        kept = first.copy()
        assert first.dtype == np.uint8 and first.ndim == 3 and first.shape[-1] == 3
        assert first.std() > 0
        images = []
        for _ in random_steps(env_batch, 16):  # in Visual Match walls surround the first position
            images.append(env_batch.render(1))
            assert images[-1].shape == first.shape
        assert any((image != first).any() for image in images)
        assert (first == kept).all()  # an image is a copy
    finally:
        env_batch.close()


@pytest.mark.parametrize("env", FAMILIES, ids=repr)
def test_rendering_changes_no_episode(env):
    rollouts = []
    for rendered in (False, True):
        env_batch = env_batch_of(env, 2)
        if rendered:
            env_batch.start_rendering()
        count = 40 if isinstance(env, Atari) else 150
        rollouts.append([env_batch.reset(), *(step for step, _ in random_steps(env_batch, count))])
        env_batch.close()
    for plain, rendered in zip(*rollouts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, rendered, strict=True))


def test_atari_renders_the_screen_in_colour_at_the_same_step():
    env_batch = env_batch_of(Atari("Breakout", one_life=True, sticky=0.25))
    env_batch.start_rendering()
    env_batch.reset()
    finished = 0
    for step, ended in random_steps(env_batch, 100):
        finished += len(ended)
        screen = env_batch.render(0)
        assert screen.shape == (210, 160, 3)
        assert (screen[..., 0] != screen[..., 2]).any()
        grey = screen @ np.array([0.299, 0.587, 0.114])
        small = grey.repeat(2, 0).reshape(84, 5, 160).mean(1).repeat(21, 1).reshape(84, 84, 40).mean(2)
        assert abs(small - step.obs[0, 0].numpy()).max() < 2
    assert finished  # the environment, not the emulator, starts episodes of one life
    env_batch.close()


def test_an_environment_in_worker_processes_renders_in_this_process():
    env_batch = env_batch_of(Gym("bestiary/Catch-v0", processes=True))
    env_batch.start_rendering()
    env_batch.reset()
    assert env_batch.render(0).shape == (320, 160, 3)
    env_batch.close()


def test_catch_and_recall_render_their_state():
    env = CatchEnv(1, 4, 3, render_mode="rgb_array")
    env.reset(seed=0)
    orange, blue = (228, 148, 109), (60, 90, 150)
    for _ in range(3):
        (image,) = env.render()
        assert (image[env.ball_row[0] * 32 + 16, env.ball_col[0] * 32 + 16] == orange).all()
        assert (image[-2, env.paddle[0] * 32 + 4] == blue).all()
        env.step(np.array([2]))
    for cues in (2, 4, 300):
        env_batch = Recall(delay=2, cues=cues).make(1, 0, 0, 1)
        env_batch.reset()
        assert (env_batch.render(0) == orange).all(-1).any()
        env_batch.step(torch.tensor([0]))
        assert not (env_batch.render(0) == orange).all(-1).any()


@dataclass(frozen=True)
class Invisible:
    """An environment that cannot be rendered."""

    def make(self, num_envs, seed, stream, threads):
        class NoRenderModes(CatchEnv):
            metadata = {**CatchEnv.metadata, "render_modes": []}

        return VectorEnvBatch("Invisible", NoRenderModes(num_envs), seed, stream)


def test_an_environment_that_cannot_be_rendered_is_refused(monkeypatch):
    import gymnasium

    class HumanOnly(gymnasium.Env):
        metadata = {"render_modes": ["human"]}
        observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

    class WithoutRgb(HumanOnly):
        def __init__(self, render_mode=None): ...

    for name, cls in (("HumanOnly-v0", HumanOnly), ("HumanOnly-v1", WithoutRgb)):
        monkeypatch.setitem(gymnasium.registry, name, gymnasium.envs.registration.EnvSpec(name, cls))
    for env in (Invisible(), Gym("HumanOnly-v0"), Gym("HumanOnly-v1")):
        env_batch = env.make(1, 0, 0, 1)
        with pytest.raises(UserError, match="cannot be rendered"):
            env_batch.start_rendering()
        env_batch.close()


# -- frames ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "scale"), [((5, 5), 60), ((84, 84), 4), ((210, 160), 2), ((400, 600), 1), ((120, 640), 2), ((9, 4000), 1)]
)
def test_small_images_are_scaled_by_integers_to_even_sizes(size, scale):
    assert default_scale(*size) == scale
    image = np.random.default_rng(0).integers(0, 255, (*size, 3), np.uint8)
    whole = video_frame(image, {"score": "0"})
    height, width = size[0] * scale, size[1] * scale
    assert whole.shape[0] == height + height % 2 + CAPTION_HEIGHT
    assert whole.shape[0] % 2 == whole.shape[1] % 2 == 0
    left = (whole.shape[1] - width) // 2
    assert (whole[:height:scale, left : left + width : scale] == image).all()
    assert (whole[scale - 1 : height : scale, left + scale - 1 : left + width : scale] == image).all()


def test_the_score_changes_only_its_column_of_the_caption():
    image = np.full((84, 84, 3), 7, np.uint8)
    one, other = (video_frame(image, {"score": score, "step": "3", "action": "1"}) for score in ("0", "12.5"))
    assert (one[:-CAPTION_HEIGHT] == other[:-CAPTION_HEIGHT]).all()
    changed = np.flatnonzero((one != other).any((0, 2)))
    assert len(changed) and changed.max() < one.shape[1] // 3  # its own column
    one = caption({"score": "0", "command": "212.3, 140"}, 400)
    assert (one != caption({"score": "0", "command": "212.3, 139"}, 400)).any()


@pytest.mark.parametrize(("x", "text"), [(0, "0"), (-0.001, "0"), (212.3, "212.3"), (140, "140"), (-0.02, "-0.02")])
def test_numbers_in_captions_are_short(x, text):
    assert number(x) == text


class CommandedAgent(Agent):
    """Always chooses action 2, with a constant command."""

    def initial_state(self, batch_size):
        return ()

    def act(self, step, state, explore, rng):
        n = len(step.is_first)
        return torch.full((n,), 2), {"command": torch.tensor([[212.3, 140.0]] * n)}, ()

    def episode_info(self, aux):
        return {"desired_return": aux["command"][:, 0], "desired_horizon": aux["command"][:, 1]}


class FrameList:
    fps = 2.5

    def __init__(self):
        self.images = []

    def add(self, image):
        self.images.append(image)


def test_captions_show_the_score_so_far_and_the_next_action(monkeypatch):
    captions = []
    monkeypatch.setattr(video, "video_frame", lambda image, words, scale: captions.append(dict(words)) or image)
    env_batch = TMaze(length=2, active=True).make(1, 0, 0, 1)  # every step away from the start costs half a point
    env_batch.start_rendering()
    frames = FrameList()
    episodes = video.play_episodes(
        VideoRecorder(CommandedAgent(), env_batch, frames, 2, None), env_batch, 2, "greedy", torch.Generator()
    )
    assert [e.steps for e in episodes] == [5, 5]
    assert [w["episode"] for w in captions] == ["1 of 2"] * 6 + ["2 of 2"] * 6
    assert [w["step"] for w in captions] == list("012345") * 2
    assert [w["action"] for w in captions] == ["2", "2", "2", "2", "2", "-"] * 2
    assert [w["score"] for w in captions] == ["0", "0", "-0.5", "-1", "-1.5", "-1.5"] * 2
    assert {(w["desired return"], w["desired horizon"]) for w in captions} == {("212.3", "140")}
    assert len(frames.images) == 2 * (5 + math.ceil(frames.fps))  # the last image of an episode is shown for a second


# -- files -------------------------------------------------------------------------------------------


def test_a_file_contains_the_images_that_were_added(tmp_path):
    images = [np.full((46, 62, 3), shade, np.uint8) for shade in (20, 120, 220)]
    with Mp4(tmp_path / "deep" / "a:b.mp4", 12.5) as mp4:
        for image in images:
            mp4.add(image)
            assert not mp4.path.exists()  # before it is complete
    metadata, found = read_back(mp4.path)
    assert metadata["fps"] == 12.5 and metadata["pix_fmt"].startswith("yuv420p") and metadata["codec"] == "h264"
    assert len(found) == 3
    assert all(abs(a.astype(int) - b).max() < 6 for a, b in zip(images, found, strict=True))
    assert [p.name for p in mp4.path.parent.iterdir()] == ["a:b.mp4"]


def test_a_cancelled_video_leaves_no_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), Mp4(tmp_path / "a.mp4", 8) as mp4:
        mp4.add(np.zeros((2, 2, 3), np.uint8))
        raise KeyboardInterrupt
    assert mp4.process is not None and mp4.process.poll() is not None
    assert not list(tmp_path.iterdir())


def test_an_error_of_ffmpeg_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"a\.mp4 cannot be written: "), Mp4(tmp_path / "a.mp4", 8) as mp4:
        mp4.add(np.zeros((2, 2, 3), np.uint8))
        assert mp4.process is not None
        mp4.process.kill()
        for _ in range(100):
            mp4.add(np.zeros((200, 200, 3), np.uint8))
    assert not list(tmp_path.iterdir())


# -- runs --------------------------------------------------------------------------------------------


def test_a_video_shows_the_episodes_of_an_evaluation(run, tmp_path):
    recorded = bestiary.video(run.path, tmp_path / "a.mp4", episodes=3, mode="sampled", seed=4)
    scores = bestiary.evaluate(run, episodes=3, modes=("sampled",), seed=4, envs=1)["sampled"]["scores"]
    assert [e.score for e in recorded.episodes] == scores
    metadata, found = read_back(recorded.file)
    assert len(found) == sum(e.steps for e in recorded.episodes) + 3 * 8
    assert metadata["fps"] == 8
    assert metadata["size"] == (640, 360 + CAPTION_HEIGHT)
    lit = [np.abs(f.astype(int) - (228, 148, 109)).max(-1).min() < 12 for f in found]
    starts = np.cumsum([0, *(e.steps + 8 for e in recorded.episodes)])[:-1]
    assert np.flatnonzero(lit).tolist() == starts.tolist()  # the first image of an episode shows the cue


def test_the_caption_shows_the_command_of_a_return_conditioned_agent(tmp_path, monkeypatch):
    captions = []
    monkeypatch.setattr(video, "caption", lambda words, width: captions.append(dict(words)) or caption(words, width))
    experiment = replace(bestiary.preset("udrl"), env=Recall(delay=4))
    run = Run.create(tmp_path / "r", experiment)
    env_batch = experiment.env.make(1, 0, 0, 1)
    agent = experiment.algo.agent(env_batch.spec, experiment.net, experiment.core)
    run.save(0, agent.state_dict(), {}, 1)
    recorded = bestiary.video(run, command=(30.0, 7.0))
    assert recorded.file.name == "video-0-seed0-command30-7.mp4"
    assert [w["desired return"] for w in captions[:4]] == ["30"] * 4
    assert [w["desired horizon"] for w in captions[:4]] == ["7", "6", "5", "4"]
    with pytest.raises(UserError, match="2 numbers, not 1"):
        bestiary.video(run, command=(30.0,))


def test_the_file_is_named_after_the_settings(run, capsys):
    assert main.main(["video", str(run.path), "--episodes", "2", "--fps", "30", "--env.delay", "3"]) == 0
    out = capsys.readouterr().out
    frames = run.load().meta["frames"]
    file = run.path / f"video-{frames}-seed0-delay-10-3.mp4"
    assert re.search(r"^scores [01], [01]$", out, re.M) and f"written to {file}" in out
    metadata, found = read_back(file)
    assert metadata["fps"] == 30 and len(found) == 2 * (4 + 30)


def test_scale_epsilon_and_frames_per_second_can_be_set(run, tmp_path):
    recorded = bestiary.video(run, tmp_path / "a.mp4", scale=1, epsilon=1.0, fps=60)
    assert read_back(recorded.file)[0]["size"] == (max(320, 3 * 84 + 20), 180 + CAPTION_HEIGHT)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], "nowhere is not a run"),
        (["nowhere", "--env.delay", "3"], "no argument is a run directory"),
        (["RUN", "--checkpoint", "77"], "has no checkpoint '77'; it has: "),
        (["RUN", "--out", "a.gif"], "give a file that ends in .mp4"),
        (["RUN", "--out", "."], "give a file that ends in .mp4"),
        (["RUN", "--out", "RUN/experiment.json/a.mp4"], "its directory is a file"),
        (["RUN", "--out", "RUN/experiment.json/b/a.mp4"], "cannot be written: Not a directory"),
        (["RUN", "--episodes", "0"], "must be at least 1"),
        (["RUN", "--scale", "0"], "must be at least 1"),
        (["RUN", "--fps", "0"], "positive"),
        (["RUN", "--epsilon", "2"], "must lie in"),
        (["RUN", "--command", "200,300"], "for agents that follow commands"),
        (["RUN", "--command", "much"], "write it like 200,300"),
        (["RUN", "--episode", "1"], "did you mean --episodes"),
        (["RUN", "--device", "cuda:7"], "cannot be used here"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(args, words, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main.main(["video", *(word.replace("RUN", str(run.path)) for word in args)])
    except SystemExit as stop:  # of the parser
        code = stop.code
    message = " ".join(re.sub(r"[─│╭╮╰╯]", " ", capsys.readouterr().err).split())
    assert code == 2 and words in message
    assert not list(tmp_path.iterdir())


def test_a_missing_extra_is_named(run, monkeypatch):
    find = extras.importlib.util.find_spec
    for missing in ("imageio_ffmpeg", "PIL"):
        monkeypatch.setattr(
            extras.importlib.util, "find_spec", lambda name, m=missing: None if name == m else find(name)
        )
        for record in (lambda: bestiary.video(run), lambda: video.check_video(Catch(), 0)):
            with pytest.raises(MissingExtra, match=r'pip install "bestiary\[video\]"'):
                record()


def test_the_commands_in_the_documentation_are_parsed():
    page = Path(__file__).parent.parent / "docs" / "video.md"
    lines = [line for line in page.read_text().splitlines() if line.startswith("bestiary video")]
    assert len(lines) > 2
    for line in lines:
        words = shlex.split(line.split(" # ")[0])[2:]
        parse(VideoCommand, words, "bestiary video", VideoCommand(Path("RUN"), VideoSettings(env=TMaze())))


def test_the_default_environment_is_that_of_the_run(run):
    assert read([str(run.path)]).settings.env == SMALL.env
    assert read([str(run.path), "--env.delay", "3"]).settings.env == replace(SMALL.env, delay=3)


# -- while training ----------------------------------------------------------------------------------


def metrics_without_time(path):
    """The metrics of a run without those of the clock."""
    with (path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    clock = ("seconds", "frames_per_second", "updates_per_second")
    return [{k: v for k, v in row.items() if k not in clock} for row in rows]


def test_videos_do_not_affect_learning(tmp_path):
    states, weights = [], []
    for name, plan in (("without", Video()), ("with", Video(every=700, episodes=2, fps=60))):
        torch.manual_seed(0)
        run = bestiary.train(replace(SMALL, video=plan), tmp_path / name)
        states.append(torch.get_rng_state())
        weights.append(run.load().weights)
    videos = sorted(p.name for p in (tmp_path / "with" / "videos").iterdir())
    assert len(videos) == 3 and int(videos[-1][:-4]) == Run(tmp_path / "with").load().meta["frames"]
    assert not (tmp_path / "without" / "videos").exists()
    assert len(metrics_without_time(tmp_path / "without")) > 2
    assert metrics_without_time(tmp_path / "without") == metrics_without_time(tmp_path / "with")
    assert (tmp_path / "without" / "episodes.csv").read_text() == (tmp_path / "with" / "episodes.csv").read_text()
    assert all(torch.equal(a, weights[1][name]) for name, a in weights[0].items())
    assert torch.equal(*states)
    again = bestiary.video(run, episodes=2, fps=60)  # the last video shows the last checkpoint
    assert again.file.read_bytes() == (tmp_path / "with" / "videos" / videos[-1]).read_bytes()


def test_a_resumed_run_may_have_other_video_settings(tmp_path):
    bestiary.train(SMALL, tmp_path / "r")
    longer = replace(SMALL, frames=3_000, video=Video(every=400))
    assert not longer.differs_from(SMALL)
    bestiary.train(longer, tmp_path / "r")
    recorded_at = [int(p.stem) for p in sorted((tmp_path / "r" / "videos").iterdir())]
    assert recorded_at[0] < 2_200 and recorded_at[-1] >= 3_000  # at once, because there was none before, and at the end
    assert all(b - a >= 400 for a, b in pairwise(recorded_at[:-1]))
    assert Experiment.from_json(longer.to_json()) == longer


def test_a_cancelled_video_is_recorded_when_the_run_is_resumed(tmp_path, monkeypatch):
    stopped = []
    shown = video.VideoRecorder._write
    monkeypatch.setattr(
        video.VideoRecorder,
        "_write",
        lambda self, last: (stopped.append(1) if self.steps > 3 else None, shown(self, last)),
    )
    plan = replace(SMALL, env=replace(SMALL.env, delay=50), video=Video(every=500))
    session = Session(plan, tmp_path / "r", NullDisplay(), stop=lambda: bool(stopped))
    for _ in session:
        pass
    assert stopped and session.runtime.frames < 1_000
    assert not list((tmp_path / "r" / "videos").iterdir())
    monkeypatch.setattr(video.VideoRecorder, "_write", shown)
    next(iterate(plan, tmp_path / "r"))  # the next one would be due much later
    assert len(list((tmp_path / "r" / "videos").iterdir())) == 1


def test_videos_that_cannot_be_recorded_are_refused_before_training(tmp_path, monkeypatch):
    unseen = replace(SMALL, video=Video(every=100))
    object.__setattr__(unseen, "env", Invisible())
    with pytest.raises(UserError, match="Invisible cannot be rendered"):
        bestiary.train(unseen, tmp_path / "r")
    find = extras.importlib.util.find_spec
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None if name == "PIL" else find(name))
    with pytest.raises(MissingExtra):
        bestiary.train(replace(SMALL, video=Video(every=100)), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_training_survives_a_video_that_fails(tmp_path):
    notes = []

    class NoteDisplay(NullDisplay):
        def activity(self, text):
            notes.append(text)

    (tmp_path / "r").mkdir()
    session = Session(replace(SMALL, video=Video(every=1_000)), tmp_path / "r", NoteDisplay())
    (tmp_path / "r" / "videos").write_text("in the way")
    for _ in session:
        pass
    assert session.finished
    assert sum("no video at" in note and "its directory is a file" in note for note in notes) == 2


@pytest.mark.parametrize("wrong", [{"every": 0}, {"episodes": 0}, {"fps": 0.0}])
def test_invalid_video_settings_are_refused(wrong):
    with pytest.raises(UserError, match=f"video.{next(iter(wrong))}"):
        Video(**wrong)


def test_the_command_line_has_the_video_settings():
    given = read_training(["tmaze", "--video.every", "1M", "--video.episodes", "2"]).experiment
    assert given.video == Video(every=1_000_000, episodes=2)
    assert given.env == TMaze()
