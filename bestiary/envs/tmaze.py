"""T-Maze (Bakker 2001; rules of Ni et al. 2023): a cue at the start of a corridor tells the turn at its end."""

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from bestiary.envs.compiled import CompiledEnv, compiled, random_int
from bestiary.envs.memory import check_length
from bestiary.errors import UserError

RIGHT, UP, LEFT, DOWN = range(4)

# The corridor is y = 0, x = 0 .. offset + length; at its last cell, the junction, lie the arms y = +1 and y = -1.
# The cue is at x = 0. Episodes start at x = offset: on the cue (passive) or one step to its right (active).
FIELDS = [
    ("length", "i8"), ("offset", "i8"), ("x", "i8"), ("y", "i8"), ("t", "i8"),
    ("goal", "i8"), ("cue", "i8"), ("seen", "?"),
]  # fmt: skip


@compiled
def tmaze_sample(s):
    s.goal = 1 - 2 * random_int(s, 0, 2)


@compiled
def tmaze_initialize(s):
    s.x, s.y, s.t = s.offset, 0, 0
    s.seen = s.offset == 0
    s.cue = s.goal if s.seen else 0
    s.success = False


@compiled
def tmaze_step(s, action):
    """One step of one environment; returns (reward, done). Being behind the shortest path costs 1/length per step."""
    junction = s.offset + s.length
    s.t += 1
    if s.y == 0 and action == RIGHT:
        s.x = min(s.x + 1, junction)
    elif s.y == 0 and action == LEFT:
        s.x = max(s.x - 1, 0)
    elif s.x == junction and action == UP:
        s.y = min(s.y + 1, 1)
    elif s.x == junction and action == DOWN:
        s.y = max(s.y - 1, -1)

    s.cue = 0
    if s.x == 0 and not s.seen:  # the cue is shown once
        s.cue, s.seen = s.goal, True
    if s.t == s.length + 2 * s.offset + 1:
        s.success = s.y == s.goal
        return (1.0 if s.success else 0.0), True
    return (-1.0 / s.length if s.x < s.t - s.offset else 0.0), False


@compiled
def tmaze_autoreset_step(s, action):
    """One step, or the reset to the next episode if the last step ended one (NEXT_STEP autoreset)."""
    if s.ended:
        s.ended = False
        s.episode += 1
        tmaze_sample(s)
        tmaze_initialize(s)
        return 0.0, False
    reward, done = tmaze_step(s, action)
    s.ended = done
    return reward, done


@compiled
def tmaze_observe(s, obs):
    """Whether the player is at the junction; the cue, or the arm the player is in; with `oracle` also the goal."""
    at_junction = s.x == s.offset + s.length
    obs[0] = at_junction
    obs[1] = s.y if at_junction else s.cue
    if len(obs) > 2:
        obs[2] = s.goal


@compiled
def tmaze_step_all(state, action, obs, reward, done):
    for i in range(len(state)):
        reward[i], done[i] = tmaze_autoreset_step(state[i], action[i])
        tmaze_observe(state[i], obs[i])


class TMazeEnv(CompiledEnv):
    """Corridor cells look alike. Being in the arm of the cue at the last step earns 1; delays cost 1/length per step.

    Passive: the first observation holds the cue. Active: the cue lies one step to the left, and the episode is just
    long enough for the detour.
    """

    hidden = {"goal": ()}
    oracle_return = 1.0
    sample_hidden = staticmethod(tmaze_sample)
    initialize = staticmethod(tmaze_initialize)
    observe = staticmethod(tmaze_observe)
    step_all = staticmethod(tmaze_step_all)

    def __init__(
        self,
        num_envs: int = 1,
        length: int = 50,
        active: bool = False,
        oracle: bool = False,
        render_mode: str | None = None,
    ) -> None:
        check_length("T-Maze", length)
        self.junction = length + active
        self.horizon = length + 2 * active + 1
        space = Box(-1.0, 1.0, (3 if oracle else 2,), np.float32)
        super().__init__(FIELDS, {"length": length, "offset": int(active)}, space, num_envs, render_mode)

    def _check(self, name: str, values: NDArray[np.int64]) -> None:
        wrong = values[abs(values) != 1]
        if len(wrong):
            raise UserError(f"reset option goal must be 1 (up) or -1 (down), not {wrong[0]}")

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        """The image has the same width for every length: long corridors are scaled."""
        s = self.state[slot]
        image = np.full((120, 640, 3), 255, np.uint8)

        def centre(x: int) -> int:
            return 40 + round(560 * x / self.junction)

        end = centre(self.junction)
        image[46:75, 26 : end + 15] = 204
        image[11:110, end - 14 : end + 15] = 204
        if self.junction <= 40:
            for x in range(self.junction):
                image[46:75, (centre(x) + centre(x + 1)) // 2] = 170
        image[[46, 74], end - 14 : end + 15] = 170
        across, down = centre(int(s["x"])), 60 - 33 * int(s["y"])
        image[down - 9 : down + 10, across - 9 : across + 10] = (228, 148, 109)
        for k in range(12 if s["cue"] else 0):  # an arrow beside the first cell, towards the goal
            row = 60 - int(s["cue"]) * (40 - k)
            image[row, centre(0) - k : centre(0) + k + 1] = (0, 130, 60)
        return image
