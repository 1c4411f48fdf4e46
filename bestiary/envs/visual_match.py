"""Passive Visual Match: remember a colour during a garden of apples (Hung et al. 2019; Ni et al. 2023)."""

from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from bestiary.envs import grid
from bestiary.envs.compiled import CompiledEnv, compiled, random_int
from bestiary.envs.grid import (
    BACKGROUND,
    FINAL_REWARD,
    FIRST,
    GARDEN,
    GATE,
    LAST,
    PLAYER,
    VIEW,
    WALL,
    cells,
    garden_colour,
    garden_step,
    move,
    place_apples,
    sample_apples,
    start_phase,
    wall_colour,
)
from bestiary.envs.memory import check_colours, check_length
from bestiary.errors import UserError
from bestiary.seeding import hash64

FIRST_STEPS = LAST_STEPS = 15
START = (2, 5)  # the player's cell in the first phase
AROUND = np.array([(r, c) for r in (1, 2, 3) for c in (4, 5, 6) if (r, c) != START])
ROOM = cells((0, slice(None)), (slice(0, 5), 0), (slice(0, 5), 10), (4, slice(0, 4)), (4, slice(7, 11)),
             (5, 3), (5, 7), (6, slice(3, 8)))  # fmt: skip
DOOR_ROW, DOOR_COLUMNS = 1, np.array([2, 5, 8])
COLOURS = np.array([(255, 0, 0), (0, 255, 0), (0, 0, 255)])
ORDERS = np.array(list(permutations(range(3))))
EACH_EPISODE = -1

FIELDS = [
    *grid.FIELDS, ("order", "i8"), ("target", "i8"), ("cue_cell", "i1", (2,)), ("door_colours", "u1", (3, 3)),
    ("chosen", "?"),
]  # fmt: skip


@compiled
def visual_match_sample(s):
    s.target = random_int(s, 0, 3)
    cue = random_int(s, 1, 8)
    s.cue_cell[0], s.cue_cell[1] = AROUND[cue, 0], AROUND[cue, 1]
    order = random_int(s, 2, 6) if s.order == EACH_EPISODE else s.order
    for door in range(3):
        for channel in range(3):
            s.door_colours[door, channel] = COLOURS[ORDERS[order, door], channel]
    sample_apples(s, 3)


@compiled
def visual_match_initialize(s):
    start_phase(s, FIRST, START[0], START[1])
    place_apples(s)
    s.chosen = s.success = False


@compiled
def door(s, row, column):
    """Index of the door at this cell; -1: none, or a door was already chosen."""
    if row == DOOR_ROW and not s.chosen:
        for k in range(3):
            if column == DOOR_COLUMNS[k]:
                return k
    return -1


@compiled
def visual_match_step(s, action):
    """One step of one environment; returns (reward, done). The last step of a phase already shows the next phase."""
    s.t += 1
    if s.phase == FIRST:  # the player is walled in
        if s.t == FIRST_STEPS:
            start_phase(s, GARDEN, GATE[0], GATE[1])
        return 0.0, False
    if s.phase == GARDEN:
        reward = garden_step(s, action)
        if s.t == s.length:
            start_phase(s, LAST, GATE[0], GATE[1])
        return reward, False
    move(s, action, ROOM)
    reward, chosen = 0.0, door(s, s.row, s.column)
    if chosen >= 0:
        s.chosen = True  # the doors disappear
        s.success = chosen == s.target
        reward = FINAL_REWARD if s.success else 0.0
    return reward, s.t == LAST_STEPS


@compiled
def visual_match_autoreset_step(s, action):
    """One step, or the reset to the next episode if the last step ended one (NEXT_STEP autoreset)."""
    if s.ended:
        s.ended = False
        s.episode += 1
        visual_match_sample(s)
        visual_match_initialize(s)
        return 0.0, False
    reward, done = visual_match_step(s, action)
    s.ended = done
    return reward, done


@compiled
def door_colour(s, k):
    return int(s.door_colours[k, 0]), int(s.door_colours[k, 1]), int(s.door_colours[k, 2])


@compiled
def visual_match_colour(s, row, column):
    """The colour of a cell, on the board or outside it."""
    if s.phase == GARDEN:
        return garden_colour(s, row, column)
    if row == s.row and column == s.column:
        return PLAYER
    if s.phase == FIRST:
        if row == s.cue_cell[0] and column == s.cue_cell[1]:
            return door_colour(s, s.target)
        return WALL if abs(row - s.row) <= 1 and abs(column - s.column) <= 1 else BACKGROUND
    index = door(s, row, column)
    return door_colour(s, index) if index >= 0 else wall_colour(ROOM, row, column)


@compiled
def visual_match_observe(s, obs):
    for i in range(VIEW):
        for j in range(VIEW):
            obs[0, i, j], obs[1, i, j], obs[2, i, j] = visual_match_colour(s, s.row + i - 2, s.column + j - 2)
    if len(obs) > 3:
        for channel in range(3):
            obs[3 + channel] = s.door_colours[s.target, channel]


@compiled
def visual_match_step_all(state, action, obs, reward, done):
    for i in range(len(state)):
        reward[i], done[i] = visual_match_autoreset_step(state[i], action[i])
        visual_match_observe(state[i], obs[i])


class VisualMatchEnv(CompiledEnv):
    """15 steps beside a colour; `length` steps among apples; 15 steps to enter the door of that colour.

    `colours` says when the door colours are sampled: `per_episode`; `per_run`, from `colour_seed` (None: 0); or
    `upstream`, from `colour_seed` when the environment is made (None: a random seed), for all of its slots.
    """

    hidden = {"target": (), "door_colours": (3, 3), "cue_cell": (2,), "apple_cells": (grid.APPLES, 2)}
    oracle_return = FINAL_REWARD
    sample_hidden = staticmethod(visual_match_sample)
    initialize = staticmethod(visual_match_initialize)
    observe = staticmethod(visual_match_observe)
    step_all = staticmethod(visual_match_step_all)

    def __init__(
        self,
        num_envs: int = 1,
        length: int = 60,
        colours: str = "per_episode",
        colour_seed: int | None = None,
        oracle: bool = False,
        render_mode: str | None = None,
    ) -> None:
        check_length("Visual Match", length)
        check_colours(colours)
        self.horizon = FIRST_STEPS + length + LAST_STEPS
        super().__init__(FIELDS, {"length": length}, grid.view_space(6 if oracle else 3), num_envs, render_mode)
        if colour_seed is None:
            colour_seed = int(np.random.default_rng().integers(2**31)) if colours == "upstream" else 0
        fixed = int(hash64(np.array([colour_seed]), 0)[0] % np.uint64(len(ORDERS)))
        self.state["order"] = EACH_EPISODE if colours == "per_episode" else fixed

    def _check(self, name: str, values: NDArray[np.int64]) -> None:
        if name == "apple_cells":
            grid.check_apples(values)
        elif name == "cue_cell":
            grid.check_cells(name, values, cells(*map(tuple, AROUND)))
        elif name == "target":
            wrong = values[(values < 0) | (values > 2)]
            if len(wrong):
                raise UserError(f"reset option target must be 0 (left), 1 (middle) or 2 (right door), not {wrong[0]}")
        elif values.min() < 0 or values.max() > 255:
            raise UserError("reset option door_colours must hold RGB values from 0 to 255")
        elif any(len({tuple(colour) for colour in doors}) < 3 for doors in values.tolist()):
            raise UserError(
                "reset option door_colours must hold three different colours, from the left door to the right"
            )

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        return grid.render_board(visual_match_colour, self.state[slot])
