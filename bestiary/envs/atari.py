"""Atari 2600 games on ale-py's C++ vector environment: single greyscale frames, raw rewards.

Frame stacking and reward clipping are done by the agent and the learner.
"""

import functools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bestiary.config.extras import require
from bestiary.config.suggestions import did_you_mean
from bestiary.envs.env_batch import EnvBatch, VectorStep
from bestiary.errors import UserError
from bestiary.seeding import derive
from bestiary.types import Snapshot, Spec

FRAMES_PER_SECOND = 60  # emulator frames per second of real time
GAMES_PER_SEED = 64  # full games per seed: a seeded reset loads the ROM again, 95 ms against 5 ms


def rom_name(game: str) -> str:
    """`Pong`, `pong`, `PongNoFrameskip-v4` and `ALE/Pong-v5` are all "pong"; `MsPacman` is "ms_pacman"."""
    require("ale_py", "atari")
    from ale_py import roms

    known = {name.replace("_", ""): name for name in roms.get_all_rom_ids()}
    plain = re.sub(r"^ALE/|(NoFrameskip|Deterministic)?(-v\d+)?$", "", game)
    letters = re.sub(r"[^a-z0-9]", "", plain.lower())
    if letters in known:
        return known[letters]
    games = [camel_case(name) for name in known.values()]
    hint = did_you_mean(camel_case(plain), games, "see `bestiary list games`")
    raise UserError(f"there is no Atari game {game!r}: {hint}")


def camel_case(rom: str) -> str:
    """The name the literature uses: "ms_pacman" -> "MsPacman"."""
    return "".join(word.capitalize() for word in rom.split("_"))


def emulator(rom: str) -> Any:
    """A single emulator without sticky actions."""
    from ale_py import ALEInterface, LoggerMode, roms

    ALEInterface.setLoggerMode(LoggerMode.Error)
    ale = ALEInterface()
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(str(roms.get_rom_path(rom)))
    return ale


def own_actions(rom: str) -> tuple[bool, ...]:
    """For each of the 18 actions, whether it belongs to the minimal action set of this game."""
    ale = emulator(rom)
    own = set(ale.getMinimalActionSet())
    return tuple(action in own for action in ale.getLegalActionSet())


class RenderTwin:
    """Two equal vector environments: one for the agent, and one in colour and full size for rendering.

    An ale-py vector environment has a single observation format. The same seeds and actions lead to the same games.
    """

    def __init__(self, env: Any, rendered: Any) -> None:
        self.env, self.rendered = env, rendered
        self.screen: NDArray[np.uint8] = np.zeros(0, np.uint8)  # [B, 1, height, width, RGB]

    def reset(self, **kwargs: Any) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        self.screen, _ = self.rendered.reset(**kwargs)
        return self.env.reset(**kwargs)

    def step(self, actions: NDArray[np.int64]) -> tuple[Any, ...]:
        self.screen, reward, *_ = self.rendered.step(actions)
        result = self.env.step(actions)
        assert np.array_equal(result[1], reward)
        return result

    def close(self) -> None:
        self.env.close()
        self.rendered.close()


class AtariEnvBatch(EnvBatch):
    """With `life_loss` a lost life is terminal for the learner, but the full game continues: only a new game is_first.

    With `one_life` the first lost life also ends the episode, and the emulator is reset.

    A checkpoint stores, for every running game, its seed, its number among the games since that seed, and the
    journal: the actions since its start. Replaying them makes resuming exact, although ale-py cannot be saved.
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
            noop_max=cfg.noop_max + 1,  # ale-py samples from 0 to noop_max - 1, and hangs at 0
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
        # sticky actions use the same random generator during play, so there every game needs a seed of its own
        self.games_per_seed = 1 if cfg.sticky else GAMES_PER_SEED
        self._game = np.zeros(num_envs, np.int64)
        self._journal = [bytearray() for _ in range(num_envs)]
        self._clock = np.zeros(num_envs, np.int64)
        self._over = np.zeros(num_envs, bool)  # ended by `one_life`; the emulator needs an explicit reset

    def _seeds(self, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        blocks = self._game // self.games_per_seed
        return np.array([derive(*self.address, int(s), int(blocks[s])) for s in np.flatnonzero(mask)], np.int64)

    def _reset(self, mask: NDArray[np.bool_], seeded: bool) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        return self.env.reset(seed=self._seeds(mask) if seeded else None, options={"reset_mask": mask})

    def _start_games(
        self, mask: NDArray[np.bool_], obs: NDArray[np.uint8], info: dict[str, Any]
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Start the games with these numbers. The first of a block is seeded; a game without a no-op is skipped."""
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

    def _start(self) -> VectorStep:
        every_slot = np.ones(self.num_envs, bool)
        self._game[:] = 0
        self._over[:] = False
        obs, info = self._start_games(every_slot, *self.env.reset(seed=0))
        for journal in self._journal:
            journal.clear()
        self._clock = info["episode_frame_number"].copy()
        return VectorStep(obs, np.zeros(self.num_envs), ~every_slot, ~every_slot, every_slot, info["lives"])

    def _advance(self, action: NDArray[np.int64]) -> VectorStep:
        obs, reward, terminated, truncated, info = self.env.step(action)
        # the frame counter restarts with a game, not with a life
        is_first = self._over | (info["episode_frame_number"] < self._clock)
        if self._over.any():  # ale-py resets the others itself; the step just made in these slots is discarded
            obs, info = self._reset(self._over, seeded=False)
        for slot, number in enumerate(action.tolist()):
            self._journal[slot].append(number)
        if is_first.any():
            self._game += is_first
            obs, info = self._start_games(is_first, obs, info)
            for slot in np.flatnonzero(is_first):
                self._journal[slot].clear()
        self._clock = info["episode_frame_number"].copy()
        if self.life_loss or self.one_life:
            # compare the life counter: ale-py's own flag misses the step to zero lives where the game continues
            assert self.stats.lives is not None
            lost = ~is_first & (info["lives"] < self.stats.lives)
            if self.one_life:
                self._over = lost & ~terminated & ~truncated
                truncated = truncated & ~lost
            terminated = terminated | lost
        return VectorStep(obs, reward, terminated, truncated, is_first, info["lives"])

    def _save(self) -> Snapshot:
        return {
            "game": self._game.tolist(),
            "over": self._over.tolist(),
            "journal": [torch.frombuffer(bytearray(j), dtype=torch.uint8) if j else None for j in self._journal],
        }

    def _restore(self, state: Snapshot) -> None:
        """Replay every running game from its seed; shorter games start later, so that all end together."""
        self._game = np.array(state["game"], np.int64)
        self._over = np.array(state.get("over", [False] * self.num_envs))  # not in checkpoints of 0.1
        self._journal = [bytearray() if j is None else bytearray(j.numpy().tobytes()) for j in state["journal"]]
        lengths = np.array([len(j) for j in self._journal])
        longest = int(lengths.max())
        _, info = self.env.reset(seed=0)
        for t in range(longest + 1):
            at = t - (longest - lengths)  # index into the journal of each slot
            if (at == 0).any():
                _, info = self._reset(at == 0, seeded=True)
                resets = np.where(at == 0, self._game % self.games_per_seed, 0)  # earlier games of the same seed
                for k in range(resets.max()):
                    _, info = self._reset(resets > k, seeded=False)
            if t < longest:
                actions = [j[k] if k >= 0 else 0 for j, k in zip(self._journal, at, strict=True)]
                _, _, _, _, info = self.env.step(np.array(actions, np.int64))
        self._clock = info["episode_frame_number"].copy()

    def start_rendering(self) -> float:
        """Frames in colour and full size, still the maximum of two frames: many sprites appear in every other one."""
        height, width = emulator(self.rom).getScreenDims()  # differs between games
        self.env = RenderTwin(self.env, self.emulators(grayscale=False, img_height=height, img_width=width))
        return FRAMES_PER_SECOND / self.spec.frames_per_step

    def render(self, slot: int) -> NDArray[np.uint8]:
        return self.env.screen[slot, 0].copy()

    def close(self) -> None:
        self.env.close()


@dataclass(frozen=True)
class Atari:
    """Atari 2600 (Bellemare et al. 2013): 84x84 greyscale, maximum of the last two frames (extra: atari)."""

    game: str = "Pong"
    """name of the game; Pong, PongNoFrameskip-v4 and ALE/Pong-v5 are the same"""
    life_loss: bool = True
    """loss of a life is terminal for the learner (discount 0); the full game and the recurrent state go on"""
    one_life: bool = False
    """the episode ends at the loss of the first life"""
    sticky: float = 0.0
    """sticky actions: probability that the emulator repeats the previous action (Machado et al. 2018: 0.25)"""
    full_actions: bool = False
    """use all 18 actions instead of the minimal action set of the game"""
    noop_max: int = 30
    """a game starts with 1 to noop_max no-op actions, in emulator frames (DQN: 30; 0: none)"""
    fire_reset: bool = True
    """press FIRE at the start of games that need it"""
    frame_skip: int = 4
    """emulator frames per agent step; the action is repeated (DQN: 4)"""
    time_limit_frames: int = 108_000
    """time limit of an episode in emulator frames; longer episodes are truncated (108,000 frames are 30 minutes)"""

    def __post_init__(self) -> None:
        if not 0 <= self.sticky < 1:
            raise UserError(f"env.sticky={self.sticky} must be a probability in [0, 1)")
        if self.frame_skip < 1 or self.noop_max < 0:
            raise UserError("env.frame-skip must be at least 1 and env.noop-max at least 0")
        if self.time_limit_frames <= self.noop_max + 2 * self.frame_skip:
            raise UserError(
                f"env.time-limit-frames={self.time_limit_frames} must be longer than the no-ops at the start"
            )

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        return AtariEnvBatch(self, num_envs, seed, stream, threads)
