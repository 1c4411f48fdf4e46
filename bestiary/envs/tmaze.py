"""T-Maze: a corridor whose end asks what its beginning told (Ni et al. 2023, after Bakker 2001)."""

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from bestiary.envs.compiled import CompiledEnv, compiled, draw
from bestiary.envs.memory import check_length
from bestiary.errors import UserError

RIGHT, UP, LEFT, DOWN = range(4)

# The corridor is y = 0, x = 0 .. offset + length; at its last cell, the junction, lie the arms y = +1 and y = -1.
# The cue is at x = 0, and everyone starts at x = offset: on it (passive) or a step to its right (active).
FIELDS = [
    ("length", "i8"), ("offset", "i8"), ("x", "i8"), ("y", "i8"), ("t", "i8"),
    ("goal", "i8"), ("cue", "i8"), ("seen", "?"),
]  # fmt: skip


@compiled
def tmaze_draw(s):
    s.goal = 1 - 2 * draw(s, 0, 2)


@compiled
def tmaze_place(s):
    s.x, s.y, s.t = s.offset, 0, 0
    s.seen = s.offset == 0
    s.cue = s.goal if s.seen else 0
    s.success = False


@compiled
def tmaze_step(s, action):
    """One move of one environment; who falls behind the straight way pays, and the last step pays out."""
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
    if s.x == 0 and not s.seen:  # it is shown once
        s.cue, s.seen = s.goal, True
    if s.t == s.length + 2 * s.offset + 1:
        s.success = s.y == s.goal
        return (1.0 if s.success else 0.0), True
    return (-1.0 / s.length if s.x < s.t - s.offset else 0.0), False


@compiled
def tmaze_turn(s, action):
    """A move, or the next episode where the last one has ended."""
    if s.ended:
        s.ended = False
        s.episode += 1
        tmaze_draw(s)
        tmaze_place(s)
        return 0.0, False
    reward, done = tmaze_step(s, action)
    s.ended = done
    return reward, done


@compiled
def tmaze_observe(s, obs):
    """Am I at the junction; the cue, or the arm I am in; and for an oracle the goal."""
    at_junction = s.x == s.offset + s.length
    obs[0] = at_junction
    obs[1] = s.y if at_junction else s.cue
    if len(obs) > 2:
        obs[2] = s.goal


@compiled
def tmaze_advance(state, action, obs, reward, done):
    for i in range(len(state)):
        reward[i], done[i] = tmaze_turn(state[i], action[i])
        tmaze_observe(state[i], obs[i])


class TMazeEnv(CompiledEnv):
    """Corridor cells look alike. Reaching the arm of the cue with the last step earns 1; falling behind costs 1/length.

    Passive: the first observation holds the cue. Active: it lies one step to the left, and there is just enough time.
    """

    hidden = {"goal": ()}
    oracle_return = 1.0
    draw_hidden = staticmethod(tmaze_draw)
    place = staticmethod(tmaze_place)
    observe = staticmethod(tmaze_observe)
    advance = staticmethod(tmaze_advance)

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

    def _picture(self, slot: int) -> NDArray[np.uint8]:
        """As wide for every length: long corridors are drawn to scale."""
        s = self.state[slot]
        picture = np.full((120, 640, 3), 255, np.uint8)

        def centre(x: int) -> int:
            return 40 + round(560 * x / self.junction)

        end = centre(self.junction)
        picture[46:75, 26 : end + 15] = 204
        picture[11:110, end - 14 : end + 15] = 204
        if self.junction <= 40:
            for x in range(self.junction):
                picture[46:75, (centre(x) + centre(x + 1)) // 2] = 170
        picture[[46, 74], end - 14 : end + 15] = 170
        across, down = centre(int(s["x"])), 60 - 33 * int(s["y"])
        picture[down - 9 : down + 10, across - 9 : across + 10] = (228, 148, 109)
        for k in range(12 if s["cue"] else 0):  # an arrow beside the first cell, towards the goal
            row = 60 - int(s["cue"]) * (40 - k)
            picture[row, centre(0) - k : centre(0) + k + 1] = (0, 130, 60)
        return picture
