"""Any environment registered with Gymnasium that has discrete actions and image or vector observations."""

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
from bestiary.envs.env_batch import EnvBatch, VectorStep
from bestiary.errors import UserError
from bestiary.seeding import derive
from bestiary.types import Snapshot, Spec

COMPONENT_NAMES = "component_names"  # attribute with the names of an environment's reward components
EnvFn = Callable[[], gymnasium.Env]
Wrapper = Callable[[gymnasium.Env], gymnasium.Env]
JOIN_TIMEOUT = 5.0  # seconds that a worker process has to exit before it is killed


class Replayable(gymnasium.Wrapper):
    """Seeds every episode, so that a running episode is determined by its number and the actions since its start.

    `reset(options={"resume": [(episode, actions), ...]})` replays the running episode of this slot.
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
        if self.over:  # resumed at the last step of an episode: the vector environment does not know that it must reset
            obs, info = self.reset()
            return obs, 0.0, False, False, info
        return self.env.step(action)


def build(cfg: "Gym", address: tuple[int, ...], wrapper: Wrapper | None = None, render: bool = False) -> gymnasium.Env:
    kwargs: dict[str, Any] = dict(cfg.kwargs) | ({"render_mode": "rgb_array"} if render else {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium's warnings about versions
        env = gymnasium.make(cfg.id, **kwargs)
    return Replayable(env if wrapper is None else wrapper(env), address)


class Probe(NamedTuple):
    """Properties of one environment, found by making it."""

    spec: Spec
    channels_last: bool  # image observations are [H, W, C]
    components: tuple[str, ...]  # names of reward components, from `bestiary.envs.reward_components`
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
    components = env.get_wrapper_attr(COMPONENT_NAMES) if env.has_wrapper_attr(COMPONENT_NAMES) else ()
    has_lives = "lives" in env.metadata
    env.close()
    if not isinstance(actions, gymnasium.spaces.Discrete):
        raise UserError(f"{cfg.id} has the action space {actions}; only Discrete is supported")
    if actions.start != 0:
        raise UserError(f"{cfg.id} numbers its actions from {actions.start}; wrap it so that they start at 0")
    if not isinstance(obs, gymnasium.spaces.Box) or len(obs.shape) not in (1, 3):
        raise UserError(
            f"{cfg.id} has the observation space {obs}; only vectors (Box of rank 1) and images (Box of rank 3) are "
            "supported: wrap it with gymnasium.wrappers.FlattenObservation"
        )
    is_image = len(obs.shape) == 3
    last = is_image and obs.shape[-1] in (1, 3, 4)
    shape = (obs.shape[2], *obs.shape[:2]) if last else obs.shape
    dtype = torch.uint8 if obs.dtype == np.uint8 else torch.float32
    horizon = None if env.spec is None else env.spec.max_episode_steps
    spec = Spec(cfg.id, tuple(shape), dtype, int(actions.n), env.metadata.get("frames_per_step", 1), horizon)
    return Probe(spec, last, tuple(components), has_lives)


def picklable(error: Exception) -> Exception:
    """The exception itself if it can be pickled, else a RuntimeError with its text; the traceback becomes a note."""
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(traceback.format_exc())
    return error


def flat_step(result: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The result of a vector step with the lives and components of its info in place of it; zeros if missing."""
    *arrays, info = result
    return (*arrays, info.get("lives", np.zeros(count)), info.get("components", np.zeros((count, 0))))


def run_worker(pipe: Connection, parent_end: Connection, env_fns: Sequence[EnvFn]) -> None:
    """Main loop of a worker process: it answers reset and step requests for its environments until the pipe closes."""
    parent_end.close()  # this is a copy; while it is open, the exit of the parent process would go unnoticed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and still needs this worker
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    env = SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.NEXT_STEP)
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            return
        if request is None:
            return
        method, argument = request
        try:
            result = env.reset(options=argument) if method == "reset" else env.step(argument)
            answer = flat_step(result, len(env_fns))
        except Exception as e:
            answer = picklable(e)
        pipe.send(answer)


class SubprocessVectorEnv:
    """A vector environment in a few worker processes, each of which steps its environments one after the other.

    One process per environment is slower than no processes at all if environments are fast, because waking a process
    up takes longer than a step. An exception of an environment is raised here; a worker that died raises an error.
    """

    def __init__(self, env_fns: Sequence[EnvFn], processes: int) -> None:
        slots_of = np.array_split(np.arange(len(env_fns)), min(processes, len(env_fns)))
        self.splits = np.cumsum([len(slots) for slots in slots_of])[:-1]
        self.workers: list[tuple[multiprocessing.Process, Connection]] = []
        for slots in slots_of:
            parent_end, worker_end = multiprocessing.Pipe()
            process = multiprocessing.Process(
                target=run_worker, args=(worker_end, parent_end, [env_fns[slot] for slot in slots]), daemon=True
            )
            process.start()
            worker_end.close()
            self.workers.append((process, parent_end))

    def reset(self, *, options: dict[str, Any]) -> tuple[NDArray[Any], dict[str, Any]]:
        obs, lives, _ = self._call("reset", [options] * len(self.workers))
        return obs, {"lives": lives}

    def step(self, action: NDArray[np.int64]) -> tuple[Any, ...]:
        *arrays, lives, components = self._call("step", np.split(action, self.splits))
        return (*arrays, {"lives": lives, "components": components})

    def _call(self, method: str, arguments: Sequence[Any]) -> list[NDArray[Any]]:
        for (process, pipe), argument in zip(self.workers, arguments, strict=True):
            try:
                pipe.send((method, argument))
            except OSError:
                raise self._worker_died(process) from None
        # all answers are received before an exception is raised, so that none is left in a pipe for the next call
        answers = [self._receive(process, pipe) for process, pipe in self.workers]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return [np.concatenate(parts) for parts in zip(*answers, strict=True)]

    def _receive(self, process: multiprocessing.Process, pipe: Connection) -> Any:
        while not pipe.poll(1.0):
            if not process.is_alive():  # another process forked meanwhile may hold the pipe open, so EOF would not come
                raise self._worker_died(process)
        try:
            return pipe.recv()
        except (EOFError, OSError):
            raise self._worker_died(process) from None

    def _worker_died(self, process: multiprocessing.Process) -> RuntimeError:
        process.join(JOIN_TIMEOUT)
        return RuntimeError(f"an environment worker process has died (exit code {process.exitcode})")

    def close(self) -> None:
        for _, pipe in self.workers:
            try:
                pipe.send(None)
            except OSError:  # it has died, or was closed before
                continue
        for process, pipe in self.workers:
            process.join(JOIN_TIMEOUT)
            process.kill()
            process.join()
            pipe.close()
        self.workers = []


class GymEnvBatch(EnvBatch):
    """A Gymnasium environment as an EnvBatch. Running episodes are resumed by replaying their actions."""

    def __init__(
        self, cfg: "Gym", num_envs: int, seed: int, stream: int, threads: int, wrapper: Wrapper | None = None
    ) -> None:
        properties = probe(cfg)
        super().__init__(properties.spec, num_envs, properties.components)
        self.channels_last, self.has_lives = properties.channels_last, properties.has_lives
        env_fns = [functools.partial(build, cfg, (seed, stream, slot), wrapper) for slot in range(num_envs)]
        self.env_fns = env_fns
        if cfg.processes:
            self.env = SubprocessVectorEnv(env_fns, threads)
        else:
            self.env = SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.NEXT_STEP)
        self._ended = np.zeros(num_envs, bool)
        self._episode = np.zeros(num_envs, np.int64)
        self._journal: list[list[int]] = [[] for _ in range(num_envs)]

    def _convert(self, obs: NDArray[Any]) -> NDArray[Any]:
        if self.channels_last:
            obs = np.moveaxis(obs, -1, 1)
        dtype = np.uint8 if self.spec.obs_dtype == torch.uint8 else np.float32
        return np.array(obs, dtype, order="C")  # vector environments reuse their buffer

    def _start(self) -> VectorStep:
        obs, info = self.env.reset(options={"resume": [(0, [])] * self.num_envs})
        none = np.zeros(self.num_envs, bool)
        self._ended[:] = False
        self._episode[:] = 0
        self._journal = [[] for _ in range(self.num_envs)]
        raw = VectorStep(self._convert(obs), np.zeros(self.num_envs), none, none, ~none)
        return raw._replace(lives=info["lives"]) if self.has_lives else raw

    def _advance(self, action: NDArray[np.int64]) -> VectorStep:
        is_first = self._ended
        obs, reward, terminated, truncated, lives, components = flat_step(self.env.step(action), self.num_envs)
        for slot, number in enumerate(action.tolist()):
            if is_first[slot]:
                self._journal[slot].clear()
            else:
                self._journal[slot].append(number)
        self._episode += is_first
        self._ended = terminated | truncated
        raw = VectorStep(self._convert(obs), reward, terminated, truncated & ~terminated, is_first)
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

    def start_rendering(self) -> float:
        """Make the environments again with render_mode="rgb_array", which Gymnasium needs at construction."""
        self.close()
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame renders into memory and needs no display
        try:
            env_fns = [functools.partial(env_fn, render=True) for env_fn in self.env_fns]
            rendered = SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.NEXT_STEP)
        except TypeError:  # the environment has no such argument
            return super().start_rendering()
        self.env = rendered
        if "rgb_array" not in (rendered.envs[0].metadata.get("render_modes") or ()):
            return super().start_rendering()
        return rendered.envs[0].metadata.get("render_fps") or 30

    def render(self, slot: int) -> NDArray[np.uint8]:
        assert isinstance(self.env, SyncVectorEnv)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                frame = np.asarray(self.env.envs[slot].render())
        except gymnasium.error.DependencyNotInstalled as e:
            raise UserError(f"rendering {self.spec.name} needs a package that is not installed: {e}") from None
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[-1] != 3:
            raise UserError(f"{self.spec.name} renders {frame.dtype} {frame.shape} instead of uint8 [height, width, 3]")
        return frame.copy()

    def close(self) -> None:
        self.env.close()


@dataclass(frozen=True)
class Gym:
    """Any Gymnasium environment with discrete actions."""

    id: str = "CartPole-v1"
    """id of the environment in Gymnasium's registry"""
    kwargs: dict[str, int | float | bool | str] = field(default_factory=dict)
    """keyword arguments for gymnasium.make"""
    processes: bool = False
    """step the environments in worker processes, one per thread (--runtime.threads; None: one per core)"""

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        return GymEnvBatch(self, num_envs, seed, stream, threads)
