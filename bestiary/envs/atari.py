"""Atari games, batched in C++: single grey frames and raw scores; stacking and clipping are the agent's."""

import functools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bestiary.config.extras import require
from bestiary.config.suggestions import did_you_mean
from bestiary.envs.env_batch import EnvBatch, Raw
from bestiary.errors import UserError
from bestiary.seeding import derive
from bestiary.types import Snapshot, Spec

FRAMES_PER_SECOND = 60  # of the console
GAMES_PER_SEED = 64  # a seeded start loads the cartridge anew: 95 ms against 5 ms


def rom_name(game: str) -> str:
    """`Pong`, `pong`, `PongNoFrameskip-v4` and `ALE/Pong-v5` are all "pong"; `MsPacman` is "ms_pacman"."""
    require("ale_py", "atari")
    from ale_py import roms

    known = {name.replace("_", ""): name for name in roms.get_all_rom_ids()}
    plain = re.sub(r"^ALE/|(NoFrameskip|Deterministic)?(-v\d+)?$", "", game)
    squashed = re.sub(r"[^a-z0-9]", "", plain.lower())
    if squashed in known:
        return known[squashed]
    games = [camel_case(name) for name in known.values()]
    hint = did_you_mean(camel_case(plain), games, "see `bestiary list games`")
    raise UserError(f"there is no Atari game {game!r}: {hint}")


def camel_case(rom: str) -> str:
    """The name the literature uses: "ms_pacman" -> "MsPacman"."""
    return "".join(word.capitalize() for word in rom.split("_"))


def emulator(rom: str) -> Any:
    """A single one, which does as it is told: no action is repeated by chance."""
    from ale_py import ALEInterface, LoggerMode, roms

    ALEInterface.setLoggerMode(LoggerMode.Error)
    ale = ALEInterface()
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(str(roms.get_rom_path(rom)))
    return ale


def own_actions(rom: str) -> tuple[bool, ...]:
    """Which of all 18 actions do something in this game."""
    ale = emulator(rom)
    own = set(ale.getMinimalActionSet())
    return tuple(action in own for action in ale.getLegalActionSet())


class Twins:
    """Emulators for the agent, and equal ones for the spectator: ale-py shows a game in one way only.

    The same seeds and actions lead to the same games.
    """

    def __init__(self, env: Any, shown: Any) -> None:
        self.env, self.shown = env, shown
        self.screen: NDArray[np.uint8] = np.zeros(0, np.uint8)  # [B, 1, height, width, RGB]

    def reset(self, **kwargs: Any) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        self.screen, _ = self.shown.reset(**kwargs)
        return self.env.reset(**kwargs)

    def step(self, actions: NDArray[np.int64]) -> tuple[Any, ...]:
        self.screen, reward, *_ = self.shown.step(actions)
        told = self.env.step(actions)
        assert np.array_equal(told[1], reward)
        return told

    def close(self) -> None:
        self.env.close()
        self.shown.close()


class AtariEnvBatch(EnvBatch):
    """Games run on, whatever ends for the learner: a lost life is terminal, and only a new game is_first.

    Games of one life are the exception: the first lost life ends them, and the whole game starts anew.

    A running game is its seed, its place among the games since that seed, and the actions since it began:
    that is what a checkpoint keeps, and it makes resuming exact although the emulators cannot be saved.
    """

    def __init__(self, cfg: "Atari", num_envs: int, seed: int, stream: int, threads: int) -> None:
        rom = rom_name(cfg.game)
        from ale_py.vector_env import AtariVectorEnv

        self.emulators = functools.partial(
            AtariVectorEnv,
            rom,
            num_envs,
            num_threads=threads,
            stack_num=1,
            frameskip=cfg.frame_skip,
            maxpool=True,
            noop_max=cfg.noop_max + 1,  # ale-py draws from 0 to one below, and hangs at 0
            use_fire_reset=cfg.fire_reset,
            reward_clipping=False,
            full_action_space=cfg.full_actions,
            repeat_action_probability=cfg.sticky,
            max_num_frames_per_episode=cfg.time_limit_frames,
        )
        self.env: Any = self.emulators()
        self.rom = rom
        actions = int(self.env.single_action_space.n)
        legal = own_actions(rom) if cfg.full_actions else None
        super().__init__(
            Spec(camel_case(rom), (1, 84, 84), torch.uint8, actions, cfg.frame_skip, legal=legal), num_envs
        )
        self.address = (seed, stream)
        self.wants_noops = cfg.noop_max > 0
        self.life_loss, self.one_life = cfg.life_loss, cfg.one_life
        # sticky actions draw from the same generator while they play, so there every game needs a seed
        self.games_per_seed = 1 if cfg.sticky else GAMES_PER_SEED
        self._game = np.zeros(num_envs, np.int64)
        self._journal = [bytearray() for _ in range(num_envs)]
        self._clock = np.zeros(num_envs, np.int64)
        self._over = np.zeros(num_envs, bool)  # for us, while the emulator would play on

    def _seeds(self, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        blocks = self._game // self.games_per_seed
        return np.array([derive(*self.address, int(s), int(blocks[s])) for s in np.flatnonzero(mask)], np.int64)

    def _reset(self, mask: NDArray[np.bool_], seeded: bool) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        return self.env.reset(seed=self._seeds(mask) if seeded else None, options={"reset_mask": mask})

    def _open_games(
        self, mask: NDArray[np.bool_], obs: NDArray[np.uint8], info: dict[str, Any]
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Games of these numbers begin; the first of a block is seeded, and one without a no-op is passed over."""
        while mask.any():
            opens_block = mask & (self._game % self.games_per_seed == 0)
            if opens_block.any():
                obs, info = self._reset(opens_block, seeded=True)
            mask = mask & (info["episode_frame_number"] == 0) & self.wants_noops
            self._game += mask
            again = mask & (self._game % self.games_per_seed != 0)
            if again.any():
                obs, info = self._reset(again, seeded=False)
        return obs, info

    def _start(self) -> Raw:
        everyone = np.ones(self.num_envs, bool)
        self._game[:] = 0
        self._over[:] = False
        obs, info = self._open_games(everyone, *self.env.reset(seed=0))
        for journal in self._journal:
            journal.clear()
        self._clock = info["episode_frame_number"].copy()
        return Raw(obs, np.zeros(self.num_envs), ~everyone, ~everyone, everyone, info["lives"])

    def _advance(self, action: NDArray[np.int64]) -> Raw:
        obs, reward, terminated, truncated, info = self.env.step(action)
        # the clock restarts with a game, never with a life
        is_first = self._over | (info["episode_frame_number"] < self._clock)
        if self._over.any():  # ale-py starts the others itself; what these have just played nobody sees
            obs, info = self._reset(self._over, seeded=False)
        for slot, chosen in enumerate(action.tolist()):
            self._journal[slot].append(chosen)
        if is_first.any():
            self._game += is_first
            obs, info = self._open_games(is_first, obs, info)
            for slot in np.flatnonzero(is_first):
                self._journal[slot].clear()
        self._clock = info["episode_frame_number"].copy()
        if self.life_loss or self.one_life:
            # the counter is the truth: ale-py's own flag misses the step to zero where play goes on
            assert self._lives is not None
            lost = ~is_first & (info["lives"] < self._lives)
            if self.one_life:
                self._over = lost & ~terminated & ~truncated
                truncated = truncated & ~lost
            terminated = terminated | lost
        return Raw(obs, reward, terminated, truncated, is_first, info["lives"])

    def _save(self) -> Snapshot:
        return {
            "game": self._game.tolist(),
            "over": self._over.tolist(),
            "journal": [torch.frombuffer(bytearray(j), dtype=torch.uint8) if j else None for j in self._journal],
        }

    def _restore(self, state: Snapshot) -> None:
        """Play every running game again from its seed; the short ones start late so that all end together."""
        self._game = np.array(state["game"], np.int64)
        self._over = np.array(state.get("over", [False] * self.num_envs))  # not in checkpoints of 0.1
        self._journal = [bytearray() if j is None else bytearray(j.numpy().tobytes()) for j in state["journal"]]
        lengths = np.array([len(j) for j in self._journal])
        longest = int(lengths.max())
        _, info = self.env.reset(seed=0)
        for t in range(longest + 1):
            at = t - (longest - lengths)  # which of its own moves each slot is at
            if (at == 0).any():
                _, info = self._reset(at == 0, seeded=True)
                place = np.where(at == 0, self._game % self.games_per_seed, 0)  # in its block
                for k in range(place.max()):
                    _, info = self._reset(place > k, seeded=False)
            if t < longest:
                moves = [j[k] if k >= 0 else 0 for j, k in zip(self._journal, at, strict=True)]
                _, _, _, _, info = self.env.step(np.array(moves, np.int64))
        self._clock = info["episode_frame_number"].copy()

    def watch(self) -> float:
        """In colour and full size, but still the maximum of two frames: many a thing is drawn in every other one."""
        height, width = emulator(self.rom).getScreenDims()  # not the same in every game
        self.env = Twins(self.env, self.emulators(grayscale=False, img_height=height, img_width=width))
        return FRAMES_PER_SECOND / self.spec.frames_per_step

    def render(self, slot: int) -> NDArray[np.uint8]:
        return self.env.screen[slot, 0].copy()

    def close(self) -> None:
        self.env.close()


@dataclass(frozen=True)
class Atari:
    """Any Atari game, 84x84 grey, frame skip 4, maximum of the last two frames (extra: atari)."""

    game: str = "Pong"
    """Pong, PongNoFrameskip-v4 and ALE/Pong-v5 all work"""
    life_loss: bool = True
    """for the learner a lost life is an end; the game and the memory go on"""
    one_life: bool = False
    """the game ends with the first life lost"""
    sticky: float = 0.0
    """probability that the previous action is repeated (Machado et al. 2018: 0.25)"""
    full_actions: bool = False
    """all 18 actions instead of those the game uses"""
    noop_max: int = 30
    """a game starts with 1 to so many no-ops, in frames"""
    fire_reset: bool = True
    frame_skip: int = 4
    time_limit_frames: int = 108_000

    def __post_init__(self) -> None:
        if not 0 <= self.sticky < 1:
            raise UserError(f"env.sticky={self.sticky} is a probability below 1")
        if self.frame_skip < 1 or self.noop_max < 0:
            raise UserError("env.frame-skip must be at least 1 and env.noop-max at least 0")
        if self.time_limit_frames <= self.noop_max + 2 * self.frame_skip:
            raise UserError(f"env.time-limit-frames={self.time_limit_frames} leaves no time to play after the no-ops")

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        return AtariEnvBatch(self, num_envs, seed, stream, threads)
