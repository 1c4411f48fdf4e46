"""Any environment registered with Gymnasium: discrete actions, pictures or vectors."""

import functools
import multiprocessing
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from bestiary.config.extras import require
from bestiary.config.suggestions import did_you_mean
from bestiary.envs.env_batch import EnvBatch, Raw
from bestiary.errors import UserError
from bestiary.seeding import derive
from bestiary.types import Snapshot, Spec

NAMES = "component_names"  # by this attribute an environment tells what its reward could be made of
Maker = Callable[[], gymnasium.Env]
Wrapper = Callable[[gymnasium.Env], gymnasium.Env]
PATIENCE = 5.0  # seconds for a process to end of its own accord


class Replayable(gymnasium.Wrapper):
    """Gives every episode a seed of its own, so that a running episode is its number and the actions since.

    `reset(options={"resume": [(episode, actions), ...]})` plays the running episode of this slot again.
    """

    def __init__(self, env: gymnasium.Env, address: tuple[int, ...]) -> None:
        super().__init__(env)
        self.address = address
        self.slot = address[-1]
        self.episode = -1
        self.over = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        resume = (options or {}).get("resume")
        self.over = False
        self.episode, actions = (self.episode + 1, []) if resume is None else resume[self.slot]
        obs, info = self.env.reset(seed=derive(*self.address, self.episode))
        for action in actions:
            obs, _, terminated, truncated, info = self.env.step(action)
            self.over = bool(terminated or truncated)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.over:  # resumed on an episode's last row: its vector environment does not know it must reset
            obs, info = self.reset()
            return obs, 0.0, False, False, info
        return self.env.step(action)


def build(cfg: "Gym", address: tuple[int, ...], wrapper: Wrapper | None = None, render: bool = False) -> gymnasium.Env:
    kwargs: dict[str, Any] = dict(cfg.kwargs) | ({"render_mode": "rgb_array"} if render else {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium's advice about versions is not the user's error
        env = gymnasium.make(cfg.id, **kwargs)
    return Replayable(env if wrapper is None else wrapper(env), address)


class Probe(NamedTuple):
    """What a single environment says of itself."""

    spec: Spec
    channels_last: bool  # of its pictures
    components: tuple[str, ...]  # of its reward, where it is a `bestiary.envs.reward_components`
    has_lives: bool


def probe(cfg: "Gym") -> Probe:
    try:
        env = build(cfg, (0, 0, 0))
    except gymnasium.error.DependencyNotInstalled as e:
        if "box2d" in str(gymnasium.spec(cfg.id).entry_point):
            require("Box2D", "box2d")
        raise UserError(f"{cfg.id} needs a package that is not installed: {e}") from None
    except gymnasium.error.Error as e:
        hint = did_you_mean(cfg.id, gymnasium.registry, str(e))
        raise UserError(f"{cfg.id!r} is not registered with Gymnasium: {hint}") from None
    except ModuleNotFoundError as e:
        raise UserError(f"{cfg.id!r} cannot be imported: {e}") from None
    except TypeError as e:
        raise UserError(f"{cfg.id} does not accept env.kwargs={cfg.kwargs}: {e}") from None
    obs, actions = env.observation_space, env.action_space
    components = env.get_wrapper_attr(NAMES) if env.has_wrapper_attr(NAMES) else ()
    has_lives = "lives" in env.metadata
    env.close()
    if not isinstance(actions, gymnasium.spaces.Discrete):
        raise UserError(f"{cfg.id} has actions {actions}; only Discrete actions are supported")
    if actions.start != 0:
        raise UserError(f"{cfg.id} counts its actions from {actions.start}; wrap it so that they start at 0")
    if not isinstance(obs, gymnasium.spaces.Box) or len(obs.shape) not in (1, 3):
        raise UserError(
            f"{cfg.id} shows {obs}; only a vector (Box of rank 1) or a picture (Box of rank 3) is supported: "
            "wrap it with gymnasium.wrappers.FlattenObservation"
        )
    is_image = len(obs.shape) == 3
    last = is_image and obs.shape[-1] in (1, 3, 4)
    shape = (obs.shape[2], *obs.shape[:2]) if last else obs.shape
    dtype = torch.uint8 if obs.dtype == np.uint8 else torch.float32
    horizon = None if env.spec is None else env.spec.max_episode_steps
    spec = Spec(cfg.id, tuple(shape), dtype, int(actions.n), env.metadata.get("frames_per_step", 1), horizon)
    return Probe(spec, last, tuple(components), has_lives)


def portable(error: Exception) -> Exception:
    """The error itself where it can travel between processes, else its words; with its traceback either way."""
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(traceback.format_exc())
    return error


def row(told: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """A vector step with the parts of its info that matter here, lives and components; zeros where there are none."""
    *plain, info = told
    return (*plain, info.get("lives", np.zeros(count)), info.get("components", np.zeros((count, 0))))


def serve(pipe: Connection, other_end: Connection, makers: Sequence[Maker]) -> None:
    """The life of a process: it steps its share of the environments for as long as someone asks."""
    other_end.close()  # a copy: while it is open, the end of whoever asks would go unnoticed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C asks for a stop at a safe point: until then there is work
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            return
        if request is None:
            return
        method, argument = request
        try:
            told = env.reset(options=argument) if method == "reset" else env.step(argument)
            answer = row(told, len(makers))
        except Exception as e:
            answer = portable(e)
        pipe.send(answer)


class Shards:
    """Many environments in a few processes, each of which steps its share one after the other.

    One process for each environment is slower than none at all where environments are quick: most of its time goes
    into waking up. An error of an environment is raised here as its own; a process that died is an error too.
    """

    def __init__(self, makers: Sequence[Maker], processes: int) -> None:
        shares = np.array_split(np.arange(len(makers)), min(processes, len(makers)))
        self.cuts = np.cumsum([len(share) for share in shares])[:-1]
        self.workers: list[tuple[multiprocessing.Process, Connection]] = []
        for share in shares:
            here, there = multiprocessing.Pipe()
            process = multiprocessing.Process(
                target=serve, args=(there, here, [makers[slot] for slot in share]), daemon=True
            )
            process.start()
            there.close()
            self.workers.append((process, here))

    def reset(self, *, options: dict[str, Any]) -> tuple[NDArray[Any], dict[str, Any]]:
        obs, lives, _ = self._ask("reset", [options] * len(self.workers))
        return obs, {"lives": lives}

    def step(self, action: NDArray[np.int64]) -> tuple[Any, ...]:
        *plain, lives, components = self._ask("step", np.split(action, self.cuts))
        return (*plain, {"lives": lives, "components": components})

    def _ask(self, method: str, arguments: Sequence[Any]) -> list[NDArray[Any]]:
        for (process, pipe), argument in zip(self.workers, arguments, strict=True):
            try:
                pipe.send((method, argument))
            except OSError:
                raise self._death(process) from None
        # everyone's answer is heard before an error is raised: none is left for the next question
        answers = [self._hear(process, pipe) for process, pipe in self.workers]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return [np.concatenate(parts) for parts in zip(*answers, strict=True)]

    def _hear(self, process: multiprocessing.Process, pipe: Connection) -> Any:
        while not pipe.poll(1.0):
            if not process.is_alive():  # a process forked meanwhile may hold the pipe open: it would stay silent
                raise self._death(process)
        try:
            return pipe.recv()
        except (EOFError, OSError):
            raise self._death(process) from None

    def _death(self, process: multiprocessing.Process) -> RuntimeError:
        process.join(PATIENCE)
        return RuntimeError(f"a process with environments has died (exit code {process.exitcode})")

    def close(self) -> None:
        for _, pipe in self.workers:
            try:
                pipe.send(None)
            except OSError:  # it has died, or was told before
                continue
        for process, pipe in self.workers:
            process.join(PATIENCE)
            process.kill()
            process.join()
            pipe.close()
        self.workers = []


class GymEnvBatch(EnvBatch):
    def __init__(
        self, cfg: "Gym", num_envs: int, seed: int, stream: int, threads: int, wrapper: Wrapper | None = None
    ) -> None:
        found = probe(cfg)
        super().__init__(found.spec, num_envs, found.components)
        self.channels_last, self.has_lives = found.channels_last, found.has_lives
        makers = [functools.partial(build, cfg, (seed, stream, slot), wrapper) for slot in range(num_envs)]
        self.makers = makers
        if cfg.processes:
            self.env = Shards(makers, threads)
        else:
            self.env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
        self._ended = np.zeros(num_envs, bool)
        self._episode = np.zeros(num_envs, np.int64)
        self._journal: list[list[int]] = [[] for _ in range(num_envs)]

    def _picture(self, obs: NDArray[Any]) -> NDArray[Any]:
        if self.channels_last:
            obs = np.moveaxis(obs, -1, 1)
        dtype = np.uint8 if self.spec.obs_dtype == torch.uint8 else np.float32
        return np.array(obs, dtype, order="C")  # vector environments reuse their buffer

    def _start(self) -> Raw:
        obs, info = self.env.reset(options={"resume": [(0, [])] * self.num_envs})
        none = np.zeros(self.num_envs, bool)
        self._ended[:] = False
        self._episode[:] = 0
        self._journal = [[] for _ in range(self.num_envs)]
        raw = Raw(self._picture(obs), np.zeros(self.num_envs), none, none, ~none)
        return raw._replace(lives=info["lives"]) if self.has_lives else raw

    def _advance(self, action: NDArray[np.int64]) -> Raw:
        is_first = self._ended
        obs, reward, terminated, truncated, lives, components = row(self.env.step(action), self.num_envs)
        for slot, chosen in enumerate(action.tolist()):
            if is_first[slot]:
                self._journal[slot].clear()
            else:
                self._journal[slot].append(chosen)
        self._episode += is_first
        self._ended = terminated | truncated
        raw = Raw(self._picture(obs), reward, terminated, truncated & ~terminated, is_first)
        if self.components:
            raw = raw._replace(components=components)
        return raw._replace(lives=lives) if self.has_lives else raw

    def _save(self) -> Snapshot:
        return {
            "episode": self._episode.tolist(),
            "journal": [list(j) for j in self._journal],
            "ended": self._ended.tolist(),
        }

    def _restore(self, state: Snapshot) -> None:
        resume = list(zip(state["episode"], state["journal"], strict=True))
        self.env.reset(options={"resume": resume})
        self._episode = np.array(state["episode"], np.int64)
        self._journal = [list(j) for j in state["journal"]]
        self._ended = np.array(state["ended"], bool)

    def watch(self) -> float:
        """Makes the environments anew: Gymnasium wants to know about pictures beforehand."""
        self.close()
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws into memory: it need not look for a screen
        try:
            makers = [functools.partial(make, render=True) for make in self.makers]
            drawn = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
        except TypeError:  # there is no such argument
            return super().watch()
        self.env = drawn
        if "rgb_array" not in (drawn.envs[0].metadata.get("render_modes") or ()):
            return super().watch()
        return drawn.envs[0].metadata.get("render_fps") or 30

    def render(self, slot: int) -> NDArray[np.uint8]:
        assert isinstance(self.env, SyncVectorEnv)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                picture = np.asarray(self.env.envs[slot].render())
        except gymnasium.error.DependencyNotInstalled as e:
            raise UserError(f"pictures of {self.spec.name} need a package that is not installed: {e}") from None
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
            raise UserError(f"{self.spec.name} shows {picture.dtype} {picture.shape} instead of a picture in colours")
        return picture.copy()

    def close(self) -> None:
        self.env.close()


@dataclass(frozen=True)
class Gym:
    """Any Gymnasium id with discrete actions."""

    id: str = "CartPole-v1"
    kwargs: dict[str, int | float | bool | str] = field(default_factory=dict)
    """arguments for gymnasium.make"""
    processes: bool = False
    """share the environments out among processes, one per thread (unless set: per core)"""

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        return GymEnvBatch(self, num_envs, seed, stream, threads)
