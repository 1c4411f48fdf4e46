"""Riverraid with named rewards: reward proxies (Pan et al. 2022), all reward components, options against an exploit.

RAM of the console, verified on the cartridge that comes with ale-py: byte 51 is the plane's x position, byte 50 the
height of its missile (180: no missile), bytes 55 and 56 the fuel, byte 58 the plane's shape (223: a wreck; all 446 lost
lives of three scripted policies began with this value, and nothing else did). Bytes are converted to int before any
arithmetic, because uint8 arithmetic wraps.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from bestiary.config.extras import require
from bestiary.envs.atari import FRAMES_PER_SECOND, emulator
from bestiary.envs.env_batch import EnvBatch, VectorStep
from bestiary.envs.gym import Gym, GymEnvBatch
from bestiary.envs.reward_components import (
    ComponentReward,
    Components,
    NamedRewards,
    Transition,
    Weights,
    format_number,
    parse_reward,
)
from bestiary.errors import UserError
from bestiary.ops.policy import RewardClip, clip_reward

ID = "bestiary/Riverraid-v0"
X, MISSILE_Y, FUEL_HIGH, FUEL_LOW, SHAPE = 51, 50, 55, 56, 58  # RAM addresses
NO_MISSILE, CENTRE, FULL, WRECK = 180, 76, 65_535, 223
DEPOT = 80  # points for destroying a fuel depot
MAX_SPEED = 1  # pixels per frame: the plane itself is never faster
PARKED = 100  # frames (25 agent steps) in the centre with a full tank after which the plane counts as parked
INTRO = 80  # frames at the start of a life in which the console ignores all actions
MAX_WAIT = 400  # frames: more than a crash or the start of a life takes
NOOP, UP = 0, 2
ACTIONS = (
    *("NOOP", "FIRE", "UP", "RIGHT", "LEFT", "DOWN", "UPRIGHT", "UPLEFT", "DOWNRIGHT", "DOWNLEFT", "UPFIRE"),
    *("RIGHTFIRE", "LEFTFIRE", "DOWNFIRE", "UPRIGHTFIRE", "UPLEFTFIRE", "DOWNRIGHTFIRE", "DOWNLEFTFIRE"),
)


def _distance_moved(t: Transition) -> int:
    return abs(t.info["x"] - t.prev_info["x"])


COMPONENTS: Components = {
    "fuel": lambda t: DEPOT * (t.reward == DEPOT),  # points for fuel depots
    "survival": lambda t: 1,
    "bullet": lambda t: t.info["bullet"],
    "moved": lambda t: _distance_moved(t) > 0,
    "centre": lambda t: (t.info["x"] - CENTRE) ** 2 / 20,
    "jumped": lambda t: _distance_moved(t) > MAX_SPEED * t.info["frames"],  # reset after a crash; `moved` is 1 as well
    "parked": lambda t: t.info["parked"] * t.info["frames"] > PARKED,
    "dead": lambda t: t.info["dead"],
}

NAMED_REWARDS: NamedRewards = {
    "fuel": lambda f: {"score": 1.0, "fuel": f - 1},
    "pacifist": lambda f: {"survival": 10.0, "bullet": -f},
    "move": lambda f: {"survival": 10.0, "moved": -f},
    "centre": lambda f: {"survival": 10.0, "centre": -f},
}


def reward_weights(text: str) -> Weights:
    """The weights of a reward given as text, such as `score`, `pacifist:20` or `10*survival-20*bullet`."""
    return parse_reward(text, {"score": None, **COMPONENTS}, NAMED_REWARDS)


# numbers of named rewards that have an effect after clipping to [-1, 1]; a test compares them with `inert_components`
EFFECTIVE_RANGE = {
    "fuel": "below 0.0125",
    "pacifist": "above 9",
    "move": "above 9",
    "centre": "above 0.0595",  # 10 - X * 55**2 / 20 is below 1 from here on; the plane gets no further than 55 pixels
}


def possible_transitions() -> dict[str, NDArray[np.float64]]:
    """The values of every component, over all combinations that can occur in a transition."""
    points, bullet, moved, parked, dead, offset = np.meshgrid(
        [0, 30, 60, DEPOT, 100, 500], [0, 1], [0, 1], [0, 1], [0, 1], np.arange(56)
    )
    values = {"score": points, "fuel": DEPOT * (points == DEPOT), "survival": np.ones_like(points), "bullet": bullet}
    values |= {"moved": moved, "centre": offset**2 / 20, "jumped": moved * dead, "parked": parked, "dead": dead}
    return {name: column.ravel().astype(float) for name, column in values.items()}


def inert_components(weights: Weights, clip: RewardClip) -> list[str]:
    """Components of a reward that do not change the clipped reward of any transition."""
    transitions = possible_transitions()

    def clipped(weights: Weights) -> torch.Tensor:
        total = sum(w * transitions[name] for name, w in weights.items()) + np.zeros(1)
        return clip_reward(torch.from_numpy(total).float(), clip)

    return [
        name
        for name, weight in weights.items()
        if weight and torch.equal(clipped(weights), clipped({k: v for k, v in weights.items() if k != name}))
    ]


def from_flags(fuel_multiplier: float = 1.0, move_penalty: float = 0.0) -> str:
    """The named reward that these flags of the reference code (Pan et al. 2022) select.

    There the sign of a flag selects between two rewards, and the defaults pay 10 for every step: no setting pays the
    score alone.
    """
    if fuel_multiplier != 1:
        number = format_number(abs(fuel_multiplier))
        return f"fuel:{format_number(fuel_multiplier)}" if fuel_multiplier >= 0 else f"pacifist:{number}"
    number = format_number(abs(move_penalty))
    return f"move:{format_number(move_penalty)}" if move_penalty >= 0 else f"centre:{number}"


def true_from_flags(true_move_penalty: float = 0.0) -> str:
    """The second reward that the reference code logs; with `fuel_multiplier` other than 1 it logs 0 instead."""
    return from_flags(move_penalty=true_move_penalty)


def fuel_level(ram: NDArray[np.uint8]) -> int:
    return 256 * int(ram[FUEL_HIGH]) + int(ram[FUEL_LOW])


class PlaneState:
    """The state of the plane, read from the console's RAM after every agent step."""

    def reset(self, ram: NDArray[np.uint8], lives: int) -> None:
        self.x, self.fuel, self.lives = int(ram[X]), fuel_level(ram), lives
        self.bullet = False
        self.parked_steps = 0
        self.dead = False

    def update(self, ram: NDArray[np.uint8], lives: int) -> None:
        fuel = fuel_level(ram)
        same_life = lives == self.lives
        # the wreck disappears long before the console counts the lost life
        self.dead = same_life and (self.dead or int(ram[SHAPE]) == WRECK)
        self.x, self.fuel, self.lives = int(ram[X]), fuel, lives
        self.bullet = int(ram[MISSILE_Y]) != NO_MISSILE
        self.parked_steps = self.parked_steps + 1 if same_life and fuel == FULL and self.x == CENTRE else 0

    def info(self) -> dict[str, Any]:
        return {
            "x": self.x,
            "fuel": self.fuel,
            "bullet": self.bullet,
            "parked": self.parked_steps,
            "dead": self.dead,
        }


def _columns() -> NDArray[np.float32]:
    """[40, 21]: the overlap of each of 40 source columns with each of 21 target columns, so that 160 become 84."""
    left = np.arange(21)[None] * (40 / 21)
    source = np.arange(40)[:, None]
    return np.clip(np.minimum(left + 40 / 21, source + 1) - np.maximum(left, source), 0, None).astype(np.float32)


COLUMNS = _columns() / (2.5 * 40 / 21)


def resize(screen: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Area interpolation from 210 x 160 to 84 x 84: five rows become two, forty columns twenty-one."""
    rows = screen.astype(np.float32).reshape(42, 5, 160)
    pairs = np.empty((42, 2, 160), np.float32)
    shared = 0.5 * rows[:, 2]
    pairs[:, 0] = rows[:, 0] + rows[:, 1] + shared
    pairs[:, 1] = rows[:, 3] + rows[:, 4] + shared
    return (pairs.reshape(84, 4, 40) @ COLUMNS + 0.5).astype(np.uint8).reshape(84, 84)


class RiverraidGame(gymnasium.Env):
    """One console: single grey images, unclipped points, and the state read from RAM in info."""

    metadata = {
        "render_modes": ["rgb_array"],
        "render_fps": FRAMES_PER_SECOND / 4,
        "frames_per_step": 4,
        "lives": True,
    }

    def __init__(
        self,
        sticky: float = 0.0,
        noop_max: int = 30,
        frame_skip: int = 4,
        time_limit_frames: int = 108_000,
        end_at_crash: bool = False,
        launch: bool = False,
        stall: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        require("ale_py", "atari")
        self.ale = emulator("riverraid")
        self.action_set = self.ale.getMinimalActionSet()
        self.sticky, self.noop_max, self.frame_skip = sticky, noop_max, frame_skip
        self.time_limit_frames = time_limit_frames
        self.end_at_crash, self.launch, self.stall = end_at_crash, launch, stall
        self.render_mode = render_mode
        self.metadata = self.metadata | {"frames_per_step": frame_skip, "render_fps": FRAMES_PER_SECOND / frame_skip}
        self.observation_space = gymnasium.spaces.Box(0, 255, (1, 84, 84), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(self.action_set))
        self.plane = PlaneState()
        self.ram = np.zeros(128, np.uint8)
        self.screens = np.zeros((2, 210, 160), np.uint8)
        self.last_action = NOOP

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.ale.reset_game()
        self.last_action = NOOP
        if self.launch:  # before the no-ops, which change nothing while the plane waits
            self._launch()
        if self.noop_max:
            for _ in range(int(self.np_random.integers(1, self.noop_max + 1))):
                self.ale.act(self.action_set[NOOP])
        self.ale.getRAM(self.ram)
        self.plane.reset(self.ram, self.ale.lives())
        self.ale.getScreenGrayscale(self.screens[0])
        self.screens[1] = self.screens[0]
        return self._observation(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        lives, points = self.plane.lives, 0.0
        for frame in range(self.frame_skip):
            # sampled here, not by the emulator, which can be seeded only by loading the cartridge again
            if not (self.sticky and self.np_random.random() < self.sticky):
                self.last_action = int(action)
            points += self.ale.act(self.action_set[self.last_action])
            if self.ale.game_over():
                break
            if frame >= self.frame_skip - 2:
                self.ale.getScreenGrayscale(self.screens[frame - self.frame_skip])
        if self.frame_skip == 1:
            self.screens[0] = self.screens[1]
        self.ale.getRAM(self.ram)
        self.plane.update(self.ram, self.ale.lives())
        crashed = self.plane.dead
        if crashed and self.end_at_crash:
            points += self._repeat_until(lambda: self.ale.lives() < lives, NOOP)
            self.plane.reset(self.ram, self.ale.lives())
        terminated = self.ale.game_over()
        if self.launch and not terminated and self.plane.lives < lives:
            points += self._launch()
        timeout = self.ale.getEpisodeFrameNumber() >= self.time_limit_frames
        stalled = self.stall is not None and self.plane.parked_steps > self.stall
        truncated = not terminated and (timeout or stalled)
        return self._observation(), points, terminated, truncated, self._info() | {"dead": crashed}

    def _repeat_until(self, done: Callable[[], bool], action: int) -> float:
        """Repeat an action until `done`, in frames that the agent does not see; return the points."""
        points = 0.0
        for _ in range(MAX_WAIT):
            if done() or self.ale.game_over():
                break
            points += self.ale.act(self.action_set[action])
        self.ale.getScreenGrayscale(self.screens[0])
        self.screens[1] = self.screens[0]
        self.ale.getRAM(self.ram)
        return points

    def _launch(self) -> float:
        """Repeat UP until the plane burns fuel: without an action it would wait for ever."""
        points = self._repeat_until(lambda: fuel_level(self.ale.getRAM()) < FULL, UP)
        self.plane.reset(self.ram, self.ale.lives())
        return points

    def _observation(self) -> NDArray[np.uint8]:
        return resize(np.maximum(self.screens[0], self.screens[1]))[None]

    def _info(self) -> dict[str, Any]:
        return {
            "lives": self.plane.lives,
            "ram": self.ram.copy(),
            "frames": self.frame_skip,
            **self.plane.info(),
        }

    def render(self) -> Any:
        return self.ale.getScreenRGB()


def riverraid(reward: str = "score", **settings: Any) -> gymnasium.Env:
    """The entry point of `gymnasium.make("bestiary/Riverraid-v0", reward="pacifist:20")`."""
    return ComponentReward(RiverraidGame(**settings), COMPONENTS, reward, NAMED_REWARDS)


class RiverraidEnvBatch(GymEnvBatch):
    """With `life_loss`, a lost life is terminal for the learner, while the game and the recurrent state continue."""

    def __init__(self, cfg: "Riverraid", num_envs: int, seed: int, stream: int, threads: int) -> None:
        settings = {f.name: getattr(cfg, f.name) for f in fields(cfg) if f.name not in ("life_loss", "processes")}
        gym = Gym(ID, {**settings, "disable_env_checker": True}, cfg.processes)
        super().__init__(gym, num_envs, seed, stream, threads)
        self.spec = self.spec._replace(name="Riverraid")
        self.life_loss = cfg.life_loss

    def _advance(self, action: NDArray[np.int64]) -> VectorStep:
        raw = super()._advance(action)
        if not self.life_loss:
            return raw
        assert raw.lives is not None and self.stats.lives is not None
        lost = ~raw.is_first & (raw.lives < self.stats.lives)
        return raw._replace(terminated=raw.terminated | lost, truncated=raw.truncated & ~lost)


@dataclass(frozen=True)
class Riverraid:
    """Atari's Riverraid with named rewards: train on one, log all reward components (extra: atari)."""

    reward: str = "score"
    """training reward: score (points, the true reward), a reward proxy with its number (fuel:10, pacifist:20, move:5,
    centre:1) or a weighted sum of components (10*survival-20*bullet)"""
    life_loss: bool = True
    """a lost life is terminal for the learner; the game and the recurrent state continue"""
    sticky: float = 0.0
    """probability per frame that the previous action is repeated (Machado et al. 2018: 0.25)"""
    noop_max: int = 30
    """an episode starts with 1 to this many no-op frames, uniformly sampled; 0: none (DQN: 30)"""
    frame_skip: int = 4
    """frames per agent step, in which the action is repeated (DQN: 4)"""
    time_limit_frames: int = 108_000
    """frames after which an episode is truncated (108,000 are 30 minutes)"""
    end_at_crash: bool = False
    """a life ends at the crash; otherwise about 44 agent steps later, when the console counts the lost life"""
    launch: bool = False
    """the plane is in flight when a life begins; otherwise it waits for the first action, for ever if there is none"""
    stall: int | None = None
    """agent steps without launching the plane after which the episode is truncated (at least 20 with frame skip 4);
    None: never"""
    named_rewards: ClassVar[NamedRewards] = NAMED_REWARDS
    processes: bool = False
    """distribute the environments over processes, one per thread (runtime.threads; None: one per core)"""

    def __post_init__(self) -> None:
        reward_weights(self.reward)
        if not 0 <= self.sticky < 1:
            raise UserError(f"env.sticky={self.sticky} must be a probability below 1")
        if self.frame_skip < 1 or self.noop_max < 0:
            raise UserError("env.frame-skip must be at least 1 and env.noop-max at least 0")
        if self.time_limit_frames <= self.noop_max + 2 * self.frame_skip:
            raise UserError(f"env.time-limit-frames={self.time_limit_frames} leaves no steps after the no-ops")
        least = -(-INTRO // self.frame_skip)
        if self.stall is not None and self.stall < least:
            raise UserError(f"env.stall={self.stall} must be at least {least}: earlier the plane cannot be launched")

    def for_evaluation(self) -> "Riverraid":
        return replace(self, processes=False)

    def advice(self, clip: RewardClip) -> list[str]:
        """Warnings for the user about components that have no effect after clipping."""
        name, colon, _ = self.reward.strip().partition(":")
        known = colon and clip == "abs_one" and name in EFFECTIVE_RANGE
        remedy = f"use {name}:X with X {EFFECTIVE_RANGE[name]}, or" if known else "train"
        return [
            f"component {component!r} of env.reward={self.reward} has no effect: with algo.reward-clip={clip} the "
            f"clipped reward of every transition is the same without it; {remedy} with --algo.reward-clip none"
            for component in inert_components(reward_weights(self.reward), clip)
        ]

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        require("ale_py", "atari")
        return RiverraidEnvBatch(self, num_envs, seed, stream, threads)
