"""Key-to-Door: take a key that pays only much later (Hung et al. 2019; Ni et al. 2023)."""

import numpy as np
from numpy.typing import NDArray

from bestiary.envs import grid
from bestiary.envs.compiled import CompiledEnv, compiled, draw
from bestiary.envs.grid import (
    FINAL_REWARD,
    FIRST,
    GARDEN,
    GATE,
    LAST,
    PLAYER,
    VIEW,
    ahead,
    cells,
    draw_apples,
    enter,
    garden_colour,
    hang_apples,
    stroll,
    walk,
    wall_colour,
)
from bestiary.envs.memory import check_length

FIRST_STEPS, LAST_STEPS = 15, 10
HALL = cells((0, slice(2, 9)), (6, slice(2, 9)), (slice(0, 7), 2), (slice(0, 7), 8), (3, 3), (3, 7))
KEY_CELLS = cells((slice(1, 3), slice(3, 8)))
START_CELLS = cells((slice(4, 6), slice(3, 8)))
LAMP = (0, 5)  # lights up in the row in which the key is taken
DOOR, START = (1, 5), (3, 5)  # of the last phase
VAULT = cells((1, slice(3, 8)), (5, slice(3, 8)), (slice(1, 6), 3), (slice(1, 6), 7)) & ~cells(DOOR)
KEY_COLOUR, DOOR_COLOUR, LIGHT = (159, 81, 44), (134, 206, 235), (255, 255, 255)

FIELDS = [
    *grid.FIELDS, ("key_cell", "i1", (2,)), ("start_cell", "i1", (2,)), ("has_key", "?"), ("light", "?"),
]  # fmt: skip


@compiled
def key_to_door_draw(s):
    key, start = draw(s, 0, 10), draw(s, 1, 10)
    s.key_cell[0], s.key_cell[1] = 1 + key // 5, 3 + key % 5
    s.start_cell[0], s.start_cell[1] = 4 + start // 5, 3 + start % 5
    draw_apples(s, 2)


@compiled
def key_to_door_place(s):
    enter(s, FIRST, s.start_cell[0], s.start_cell[1])
    hang_apples(s)
    s.has_key = s.light = s.success = False


@compiled
def is_cell(cell, row, column):
    return row == cell[0] and column == cell[1]


@compiled
def key_to_door_step(s, action):
    """One move of one environment. A phase's last move already shows the next phase."""
    s.t += 1
    s.light = False
    if s.phase == FIRST:
        walk(s, action, HALL)
        if not s.has_key and is_cell(s.key_cell, s.row, s.column):
            s.has_key = s.light = True
        if s.t == FIRST_STEPS:
            enter(s, GARDEN, GATE[0], GATE[1])
        return 0.0, False
    if s.phase == GARDEN:
        reward = stroll(s, action)
        if s.t == s.length:
            enter(s, LAST, START[0], START[1])
        return reward, False
    reward = 0.0
    row, column = ahead(s, action)
    if not is_cell(DOOR, row, column) or s.has_key or s.success:  # a door once opened stays open
        walk(s, action, VAULT)
    if is_cell(DOOR, s.row, s.column) and s.has_key:
        s.has_key, s.success = False, True
        reward = FINAL_REWARD
    return reward, s.t == LAST_STEPS


@compiled
def key_to_door_turn(s, action):
    """A move, or the next episode where the last one has ended."""
    if s.ended:
        s.ended = False
        s.episode += 1
        key_to_door_draw(s)
        key_to_door_place(s)
        return 0.0, False
    reward, done = key_to_door_step(s, action)
    s.ended = done
    return reward, done


@compiled
def key_to_door_colour(s, row, column):
    """Of a cell, on the board or off it."""
    if s.phase == GARDEN:
        return garden_colour(s, row, column)
    if s.phase == LAST and is_cell(DOOR, row, column):
        return DOOR_COLOUR  # hides whoever stands in it
    if row == s.row and column == s.column:
        return PLAYER
    if s.phase == LAST:
        return wall_colour(VAULT, row, column)
    if not s.has_key and is_cell(s.key_cell, row, column):
        return KEY_COLOUR
    return LIGHT if s.light and is_cell(LAMP, row, column) else wall_colour(HALL, row, column)


@compiled
def key_to_door_observe(s, obs):
    for i in range(VIEW):
        for j in range(VIEW):
            obs[0, i, j], obs[1, i, j], obs[2, i, j] = key_to_door_colour(s, s.row + i - 2, s.column + j - 2)
    if len(obs) > 3:
        obs[3] = 255 if s.has_key else 0


@compiled
def key_to_door_advance(state, action, obs, reward, done):
    for i in range(len(state)):
        reward[i], done[i] = key_to_door_turn(state[i], action[i])
        key_to_door_observe(state[i], obs[i])


class KeyToDoorEnv(CompiledEnv):
    """15 steps to find a key; `length` steps among apples; 10 steps to a door that opens, and pays, only with it."""

    hidden = {"key_cell": (2,), "start_cell": (2,), "apple_cells": (grid.APPLES, 2)}
    oracle_return = FINAL_REWARD
    draw_hidden = staticmethod(key_to_door_draw)
    place = staticmethod(key_to_door_place)
    observe = staticmethod(key_to_door_observe)
    advance = staticmethod(key_to_door_advance)

    def __init__(
        self, num_envs: int = 1, length: int = 60, oracle: bool = False, render_mode: str | None = None
    ) -> None:
        check_length("Key-to-Door", length)
        self.horizon = FIRST_STEPS + length + LAST_STEPS
        super().__init__(FIELDS, {"length": length}, grid.view_space(4 if oracle else 3), num_envs, render_mode)

    def _check(self, name: str, values: NDArray[np.int64]) -> None:
        if name == "apple_cells":
            grid.check_apples(values)
        else:
            grid.check_cells(name, values, KEY_CELLS if name == "key_cell" else START_CELLS)

    def _picture(self, slot: int) -> NDArray[np.uint8]:
        return grid.picture(key_to_door_colour, self.state[slot])
