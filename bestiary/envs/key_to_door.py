"""Key-to-Door: long-term credit assignment; a key pays only at a much later door (Hung et al. 2019; Ni et al. 2023)."""

import numpy as np
from numpy.typing import NDArray

from bestiary.envs import grid
from bestiary.envs.compiled import CompiledEnv, compiled, random_int
from bestiary.envs.grid import (
    FINAL_REWARD,
    FIRST,
    GARDEN,
    GATE,
    LAST,
    PLAYER,
    VIEW,
    cells,
    garden_colour,
    garden_step,
    move,
    next_cell,
    place_apples,
    sample_apples,
    start_phase,
    wall_colour,
)
from bestiary.envs.memory import check_length

FIRST_STEPS, LAST_STEPS = 15, 10
HALL = cells((0, slice(2, 9)), (6, slice(2, 9)), (slice(0, 7), 2), (slice(0, 7), 8), (3, 3), (3, 7))
KEY_CELLS = cells((slice(1, 3), slice(3, 8)))
START_CELLS = cells((slice(4, 6), slice(3, 8)))
LAMP = (0, 5)  # lit at the step at which the key is taken
DOOR, START = (1, 5), (3, 5)  # cells of the last phase
VAULT = cells((1, slice(3, 8)), (5, slice(3, 8)), (slice(1, 6), 3), (slice(1, 6), 7)) & ~cells(DOOR)
KEY_COLOUR, DOOR_COLOUR, LIGHT = (159, 81, 44), (134, 206, 235), (255, 255, 255)

FIELDS = [
    *grid.FIELDS, ("key_cell", "i1", (2,)), ("start_cell", "i1", (2,)), ("has_key", "?"), ("light", "?"),
]  # fmt: skip


@compiled
def key_to_door_sample(s):
    key, start = random_int(s, 0, 10), random_int(s, 1, 10)
    s.key_cell[0], s.key_cell[1] = 1 + key // 5, 3 + key % 5
    s.start_cell[0], s.start_cell[1] = 4 + start // 5, 3 + start % 5
    sample_apples(s, 2)


@compiled
def key_to_door_initialize(s):
    start_phase(s, FIRST, s.start_cell[0], s.start_cell[1])
    place_apples(s)
    s.has_key = s.light = s.success = False


@compiled
def is_cell(cell, row, column):
    return row == cell[0] and column == cell[1]


@compiled
def key_to_door_step(s, action):
    """One step of one environment; returns (reward, done). The last step of a phase already shows the next phase."""
    s.t += 1
    s.light = False
    if s.phase == FIRST:
        move(s, action, HALL)
        if not s.has_key and is_cell(s.key_cell, s.row, s.column):
            s.has_key = s.light = True
        if s.t == FIRST_STEPS:
            start_phase(s, GARDEN, GATE[0], GATE[1])
        return 0.0, False
    if s.phase == GARDEN:
        reward = garden_step(s, action)
        if s.t == s.length:
            start_phase(s, LAST, START[0], START[1])
        return reward, False
    reward = 0.0
    row, column = next_cell(s, action)
    if not is_cell(DOOR, row, column) or s.has_key or s.success:  # an opened door stays open
        move(s, action, VAULT)
    if is_cell(DOOR, s.row, s.column) and s.has_key:
        s.has_key, s.success = False, True
        reward = FINAL_REWARD
    return reward, s.t == LAST_STEPS


@compiled
def key_to_door_autoreset_step(s, action):
    """One step, or the reset to the next episode if the last step ended one (NEXT_STEP autoreset)."""
    if s.ended:
        s.ended = False
        s.episode += 1
        key_to_door_sample(s)
        key_to_door_initialize(s)
        return 0.0, False
    reward, done = key_to_door_step(s, action)
    s.ended = done
    return reward, done


@compiled
def key_to_door_colour(s, row, column):
    """The colour of a cell, on the board or outside it."""
    if s.phase == GARDEN:
        return garden_colour(s, row, column)
    if s.phase == LAST and is_cell(DOOR, row, column):
        return DOOR_COLOUR  # hides the player in the doorway
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
def key_to_door_step_all(state, action, obs, reward, done):
    for i in range(len(state)):
        reward[i], done[i] = key_to_door_autoreset_step(state[i], action[i])
        key_to_door_observe(state[i], obs[i])


class KeyToDoorEnv(CompiledEnv):
    """15 steps to find a key; `length` steps among apples; 10 steps to a door that pays if the key was taken."""

    hidden = {"key_cell": (2,), "start_cell": (2,), "apple_cells": (grid.APPLES, 2)}
    oracle_return = FINAL_REWARD
    sample_hidden = staticmethod(key_to_door_sample)
    initialize = staticmethod(key_to_door_initialize)
    observe = staticmethod(key_to_door_observe)
    step_all = staticmethod(key_to_door_step_all)

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

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        return grid.render_board(key_to_door_colour, self.state[slot])
