"""Riverraid as a laboratory of rewards: proxies by name, all components on record, and instruments against an exploit.

Memory of the console, verified on the cartridge that comes with ale-py: byte 51 is where the plane is, 50 how high its
shot (180: there is none), 55 and 56 the fuel, 58 what the plane looks like (223: it has crashed; 446 of 446 lost lives
of three scripted players began with it, and nothing else did). Bytes are widened before anything is computed: in eight
bits it wraps.
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
from bestiary.envs.env_batch import EnvBatch, Raw
from bestiary.envs.gym import Gym, GymEnvBatch
from bestiary.envs.reward_components import Components, Move, Named, Proxy, Weights, parse_reward, plain
from bestiary.errors import UserError
from bestiary.ops.policy import RewardClip, clip_reward

ID = "bestiary/Riverraid-v0"
X, SHOT, FUEL_HIGH, FUEL_LOW, SHAPE = 51, 50, 55, 56, 58
NO_SHOT, CENTRE, FULL, WRECK = 180, 76, 65_535, 223
DEPOT = 80  # points for shooting one
LEAP = 1  # pixels: the plane itself moves no further in a frame
PARKED = 100  # frames (25 moves) of standing still with a full tank, after which it is no coincidence
INTRO = 80  # frames when a life begins, in which no button does anything
LONG = 400  # frames: more than a crash or the start of a life takes
NOOP, UP = 0, 2
ACTIONS = (
    *("NOOP", "FIRE", "UP", "RIGHT", "LEFT", "DOWN", "UPRIGHT", "UPLEFT", "DOWNRIGHT", "DOWNLEFT", "UPFIRE"),
    *("RIGHTFIRE", "LEFTFIRE", "DOWNFIRE", "UPRIGHTFIRE", "UPLEFTFIRE", "DOWNRIGHTFIRE", "DOWNLEFTFIRE"),
)


def _leap(move: Move) -> int:
    return abs(move.info["x"] - move.before["x"])


COMPONENTS: Components = {
    "fuel": lambda m: DEPOT * (m.reward == DEPOT),  # points for depots
    "survival": lambda m: 1,
    "bullet": lambda m: m.info["bullet"],
    "moved": lambda m: _leap(m) > 0,
    "centre": lambda m: (m.info["x"] - CENTRE) ** 2 / 20,
    "jumped": lambda m: _leap(m) > LEAP * m.info["frames"],  # put back after a crash: `moved` counts it as well
    "parked": lambda m: m.info["parked"] * m.info["frames"] > PARKED,
    "dead": lambda m: m.info["dead"],
}

PROXIES: Named = {
    "fuel": lambda f: {"score": 1.0, "fuel": f - 1},
    "pacifist": lambda f: {"survival": 10.0, "bullet": -f},
    "move": lambda f: {"survival": 10.0, "moved": -f},
    "centre": lambda f: {"survival": 10.0, "centre": -f},
}


def reward_of(text: str) -> Weights:
    return parse_reward(text, {"score": None, **COMPONENTS}, PROXIES)


LIVELY = {  # what clipping to [-1, 1] leaves of a named reward; found by `inert`, and held to it by a test
    "fuel": "below 0.0125",
    "pacifist": "above 9",
    "move": "above 9",
    "centre": "above 0.0595",  # 10 less 55 pixels squared over 20: below 1 from here on
}


def possible_moves() -> dict[str, NDArray[np.float64]]:
    """Every component, over all kinds of moves there are."""
    points, bullet, moved, parked, dead, offset = np.meshgrid(
        [0, 30, 60, DEPOT, 100, 500], [0, 1], [0, 1], [0, 1], [0, 1], np.arange(56)
    )
    found = {"score": points, "fuel": DEPOT * (points == DEPOT), "survival": np.ones_like(points), "bullet": bullet}
    found |= {"moved": moved, "centre": offset**2 / 20, "jumped": moved * dead, "parked": parked, "dead": dead}
    return {name: values.ravel().astype(float) for name, values in found.items()}


def inert(weights: Weights, clip: RewardClip) -> list[str]:
    """Components whose weight makes no difference to any move once rewards are clipped."""
    moves = possible_moves()

    def paid(weights: Weights) -> torch.Tensor:
        total = sum(w * moves[name] for name, w in weights.items()) + np.zeros(1)
        return clip_reward(torch.from_numpy(total).float(), clip)

    return [
        name
        for name, weight in weights.items()
        if weight and torch.equal(paid(weights), paid({k: v for k, v in weights.items() if k != name}))
    ]


def from_flags(fuel_multiplier: float = 1.0, move_penalty: float = 0.0) -> str:
    """The reward that these flags of the reference code stand for.

    Its signs are overloaded, and its defaults pay 10 for every step: there a plain score cannot be had at all.
    """
    if fuel_multiplier != 1:
        return f"fuel:{plain(fuel_multiplier)}" if fuel_multiplier >= 0 else f"pacifist:{plain(-fuel_multiplier)}"
    return f"move:{plain(move_penalty)}" if move_penalty >= 0 else f"centre:{plain(-move_penalty)}"


def true_from_flags(true_move_penalty: float = 0.0) -> str:
    """The reward that the reference code logs beside the one it pays; where `fuel_multiplier` is not 1, it logs 0."""
    return from_flags(move_penalty=true_move_penalty)


def fuel_in(ram: NDArray[np.uint8]) -> int:
    return 256 * int(ram[FUEL_HIGH]) + int(ram[FUEL_LOW])


class Plane:
    """What the console's memory says of the plane, and what follows from the way it changes."""

    def begin(self, ram: NDArray[np.uint8], lives: int) -> None:
        self.x, self.fuel, self.lives = int(ram[X]), fuel_in(ram), lives
        self.bullet = False
        self.still = 0  # moves parked
        self.dead = False

    def move(self, ram: NDArray[np.uint8], lives: int) -> None:
        fuel = fuel_in(ram)
        same_life = lives == self.lives
        # the wreck is gone long before the console counts the life
        self.dead = same_life and (self.dead or int(ram[SHAPE]) == WRECK)
        self.x, self.fuel, self.lives = int(ram[X]), fuel, lives
        self.bullet = int(ram[SHOT]) != NO_SHOT
        self.still = self.still + 1 if same_life and fuel == FULL and self.x == CENTRE else 0

    def told(self) -> dict[str, Any]:
        return {"x": self.x, "fuel": self.fuel, "bullet": self.bullet, "parked": self.still, "dead": self.dead}


def _columns() -> NDArray[np.float32]:
    """[40, 21]: how much of 40 columns each of 21 covers, so that 160 become 84."""
    left = np.arange(21)[None] * (40 / 21)
    source = np.arange(40)[:, None]
    return np.clip(np.minimum(left + 40 / 21, source + 1) - np.maximum(left, source), 0, None).astype(np.float32)


COLUMNS = _columns() / (2.5 * 40 / 21)


def shrink(screen: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """210 x 160 to 84 x 84 by area: five rows become two, forty columns twenty-one."""
    rows = screen.astype(np.float32).reshape(42, 5, 160)
    pairs = np.empty((42, 2, 160), np.float32)
    shared = 0.5 * rows[:, 2]
    pairs[:, 0] = rows[:, 0] + rows[:, 1] + shared
    pairs[:, 1] = rows[:, 3] + rows[:, 4] + shared
    return (pairs.reshape(84, 4, 40) @ COLUMNS + 0.5).astype(np.uint8).reshape(84, 84)


class RiverraidGame(gymnasium.Env):
    """One console: single grey frames, raw points, and in info what the memory says."""

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
        self.buttons = self.ale.getMinimalActionSet()
        self.sticky, self.noop_max, self.frame_skip = sticky, noop_max, frame_skip
        self.time_limit_frames = time_limit_frames
        self.end_at_crash, self.launch, self.stall = end_at_crash, launch, stall
        self.render_mode = render_mode
        self.metadata = self.metadata | {"frames_per_step": frame_skip, "render_fps": FRAMES_PER_SECOND / frame_skip}
        self.observation_space = gymnasium.spaces.Box(0, 255, (1, 84, 84), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(self.buttons))
        self.plane = Plane()
        self.ram = np.zeros(128, np.uint8)
        self.screens = np.zeros((2, 210, 160), np.uint8)
        self.pressed = NOOP

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.ale.reset_game()
        self.pressed = NOOP
        if self.launch:  # first: on the ground, waiting changes nothing
            self._launch()
        if self.noop_max:
            for _ in range(int(self.np_random.integers(1, self.noop_max + 1))):
                self.ale.act(self.buttons[NOOP])
        self.ale.getRAM(self.ram)
        self.plane.begin(self.ram, self.ale.lives())
        self.ale.getScreenGrayscale(self.screens[0])
        self.screens[1] = self.screens[0]
        return self._picture(), self._told()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        lives, points = self.plane.lives, 0.0
        for frame in range(self.frame_skip):
            # drawn here, not by the emulator, which could be seeded only by loading the cartridge anew
            if not (self.sticky and self.np_random.random() < self.sticky):
                self.pressed = int(action)
            points += self.ale.act(self.buttons[self.pressed])
            if self.ale.game_over():
                break
            if frame >= self.frame_skip - 2:
                self.ale.getScreenGrayscale(self.screens[frame - self.frame_skip])
        if self.frame_skip == 1:
            self.screens[0] = self.screens[1]
        self.ale.getRAM(self.ram)
        self.plane.move(self.ram, self.ale.lives())
        crashed = self.plane.dead
        if crashed and self.end_at_crash:
            points += self._until(lambda: self.ale.lives() < lives, NOOP)
            self.plane.begin(self.ram, self.ale.lives())
        over = self.ale.game_over()
        if self.launch and not over and self.plane.lives < lives:
            points += self._launch()
        late = self.ale.getEpisodeFrameNumber() >= self.time_limit_frames
        stalled = self.stall is not None and self.plane.still > self.stall
        return self._picture(), points, over, not over and (late or stalled), self._told() | {"dead": crashed}

    def _until(self, done: Callable[[], bool], button: int) -> float:
        """Frames that the agent does not see, and what they earn."""
        points = 0.0
        for _ in range(LONG):
            if done() or self.ale.game_over():
                break
            points += self.ale.act(self.buttons[button])
        self.ale.getScreenGrayscale(self.screens[0])
        self.screens[1] = self.screens[0]
        self.ale.getRAM(self.ram)
        return points

    def _launch(self) -> float:
        """The plane waits for a button, and would for ever: press one until it burns fuel."""
        points = self._until(lambda: fuel_in(self.ale.getRAM()) < FULL, UP)
        self.plane.begin(self.ram, self.ale.lives())
        return points

    def _picture(self) -> NDArray[np.uint8]:
        return shrink(np.maximum(self.screens[0], self.screens[1]))[None]

    def _told(self) -> dict[str, Any]:
        return {
            "lives": self.plane.lives,
            "ram": self.ram.copy(),
            "frames": self.frame_skip,
            **self.plane.told(),
        }

    def render(self) -> Any:
        return self.ale.getScreenRGB()


def riverraid(reward: str = "score", **settings: Any) -> gymnasium.Env:
    """For `gymnasium.make("bestiary/Riverraid-v0", reward="pacifist:20")`."""
    return Proxy(RiverraidGame(**settings), COMPONENTS, reward, PROXIES)


class RiverraidEnvBatch(GymEnvBatch):
    """For the learner a lost life may be an end, while the game and the memory go on."""

    def __init__(self, cfg: "Riverraid", num_envs: int, seed: int, stream: int, threads: int) -> None:
        ours = {f.name: getattr(cfg, f.name) for f in fields(cfg) if f.name not in ("life_loss", "processes")}
        game = Gym(ID, {**ours, "disable_env_checker": True}, cfg.processes)
        super().__init__(game, num_envs, seed, stream, threads)
        self.spec = self.spec._replace(name="Riverraid")
        self.life_loss = cfg.life_loss

    def _advance(self, action: NDArray[np.int64]) -> Raw:
        raw = super()._advance(action)
        if not self.life_loss:
            return raw
        assert raw.lives is not None and self._lives is not None
        lost = ~raw.is_first & (raw.lives < self._lives)
        return raw._replace(terminal=raw.terminal | lost, truncated=raw.truncated & ~lost)


@dataclass(frozen=True)
class Riverraid:
    """Riverraid with rewards by name: train on one, keep record of all (extra: atari)."""

    reward: str = "score"
    """score; fuel:10, pacifist:20, move:5, centre:1; or a sum of components: 10*survival-20*bullet"""
    life_loss: bool = True
    """for the learner a lost life is an end; the game and the memory go on"""
    sticky: float = 0.0
    """probability that the previous action is repeated, in every frame"""
    noop_max: int = 30
    """a game starts with 1 to so many no-ops, in frames"""
    frame_skip: int = 4
    time_limit_frames: int = 108_000
    end_at_crash: bool = False
    """a life ends with the crash, not some 44 steps later when the console counts it: those steps are not played"""
    launch: bool = False
    """the plane is in the air when a life begins; else it waits for the first button, and could for ever"""
    stall: int | None = None
    """moves of waiting like that, after which the game is cut short"""
    named_rewards: ClassVar[Named] = PROXIES
    processes: bool = False
    """share the consoles out among processes, one per thread (unless set: per core)"""

    def __post_init__(self) -> None:
        reward_of(self.reward)
        if not 0 <= self.sticky < 1:
            raise UserError(f"env.sticky={self.sticky} is a probability below 1")
        if self.frame_skip < 1 or self.noop_max < 0:
            raise UserError("env.frame-skip must be at least 1 and env.noop-max at least 0")
        if self.time_limit_frames <= self.noop_max + 2 * self.frame_skip:
            raise UserError(f"env.time-limit-frames={self.time_limit_frames} leaves no time to play after the no-ops")
        least = -(-INTRO // self.frame_skip)
        if self.stall is not None and self.stall < least:
            raise UserError(f"env.stall={self.stall} must be at least {least}: before that, a plane cannot be launched")

    def for_evaluation(self) -> "Riverraid":
        return replace(self, processes=False)

    def advice(self, clip: RewardClip) -> list[str]:
        """What a user should know before training on this reward, clipped like that."""
        name, colon, _ = self.reward.strip().partition(":")
        known = colon and clip == "abs_one" and name in LIVELY
        would = f"{name}:X counts for X {LIVELY[name]}, or" if known else "it counts"
        return [
            f"env.reward={self.reward} is not what is learnt: with algo.reward-clip={clip} every move is paid as if "
            f"{part!r} were worth nothing; {would} with --algo.reward-clip none"
            for part in inert(reward_of(self.reward), clip)
        ]

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        require("ale_py", "atari")
        return RiverraidEnvBatch(self, num_envs, seed, stream, threads)
