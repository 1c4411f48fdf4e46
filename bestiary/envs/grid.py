"""Shared by the two grid tasks: the board, the 5x5 view around the player, and the garden with apples.

An episode has three phases; the second is the garden. Cells are (row, column), with row 0 at the top.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from bestiary.envs.compiled import compiled, random_int
from bestiary.errors import UserError

ROWS, COLUMNS, VIEW = 7, 11, 5
NORTH, SOUTH, WEST, EAST = range(4)
APPLES, RESPAWN = 10, 20  # an apple grows again after so many steps
APPLE_REWARD, FINAL_REWARD = 1.0, 5.0
FIRST, GARDEN, LAST = range(3)  # phases

BACKGROUND, WALL, PLAYER, APPLE = (204, 204, 204), (25, 25, 25), (228, 148, 109), (140, 178, 0)


def cells(*cells: tuple[Any, Any]) -> NDArray[np.bool_]:
    """A board that is true at these cells; each of the two indices may be a slice."""
    board = np.zeros((ROWS, COLUMNS), bool)
    for cell in cells:
        board[cell] = True
    return board


FENCE = ~cells((slice(1, ROWS - 1), slice(1, COLUMNS - 1)))
GATE = (5, 5)  # where the player enters the garden
CHEQUERED = np.add.outer(np.arange(ROWS), np.arange(COLUMNS)) % 2 == 0
MAY_GROW = CHEQUERED & ~FENCE & ~cells(GATE)
TREES = np.argwhere(MAY_GROW)  # [22, 2]
TREE_AT = np.where(MAY_GROW, np.cumsum(MAY_GROW).reshape(MAY_GROW.shape) - 1, -1)  # index of a cell in TREES, or -1
NEVER = 2**31 - 1

# `back` holds, for every tree, the step of the phase from which on its apple is visible (again)
FIELDS: list[tuple[Any, ...]] = [
    ("length", "i8"), ("phase", "i8"), ("t", "i8"), ("row", "i8"), ("column", "i8"),
    ("apple_cells", "i1", (APPLES, 2)), ("back", "i4", (len(TREES),)),
]  # fmt: skip


@compiled
def sample_apples(s, index):
    """Sample ten of the trees uniformly (Fisher-Yates); uses the random numbers from `index` on."""
    order = np.arange(TREES.shape[0])
    for k in range(APPLES):
        other = k + random_int(s, index + k, len(order) - k)
        order[k], order[other] = order[other], order[k]
        s.apple_cells[k, 0], s.apple_cells[k, 1] = TREES[order[k], 0], TREES[order[k], 1]


@compiled
def place_apples(s):
    for tree in range(TREES.shape[0]):
        s.back[tree] = NEVER
    for k in range(APPLES):
        s.back[TREE_AT[s.apple_cells[k, 0], s.apple_cells[k, 1]]] = 0


@compiled
def collect_apple(s):
    """The reward of the player's cell; an apple counts only if it was visible before this step."""
    tree = TREE_AT[s.row, s.column]
    if tree >= 0 and s.t > s.back[tree]:
        s.back[tree] = s.t + RESPAWN + 1
        return APPLE_REWARD
    return 0.0


@compiled
def next_cell(s, action):
    """The cell that an action leads to, clipped to the board."""
    row = s.row + (action == SOUTH) - (action == NORTH)
    column = s.column + (action == EAST) - (action == WEST)
    return min(max(row, 0), ROWS - 1), min(max(column, 0), COLUMNS - 1)


@compiled
def move(s, action, walls):
    row, column = next_cell(s, action)
    if not walls[row, column]:
        s.row, s.column = row, column


@compiled
def garden_step(s, action):
    """One step in the garden; returns the reward."""
    move(s, action, FENCE)
    return collect_apple(s)


@compiled
def start_phase(s, phase, row, column):
    s.phase, s.t, s.row, s.column = phase, 0, row, column


@compiled
def on_board(row, column):
    return 0 <= row < ROWS and 0 <= column < COLUMNS


@compiled
def wall_colour(walls, row, column):
    return WALL if on_board(row, column) and walls[row, column] else BACKGROUND


@compiled
def garden_colour(s, row, column):
    if row == s.row and column == s.column:
        return PLAYER
    if on_board(row, column) and TREE_AT[row, column] >= 0 and s.t >= s.back[TREE_AT[row, column]]:
        return APPLE
    return wall_colour(FENCE, row, column)


# -- in Python: spaces, reset options, rendering -----------------------------------------------------------------


def view_space(channels: int) -> Box:
    return Box(0, 255, (channels, VIEW, VIEW), np.uint8)


def check_cells(name: str, values: NDArray[np.int64], allowed: NDArray[np.bool_]) -> None:
    """Raise UserError for cells [..., 2] that are not allowed."""
    for row, column in values.reshape(-1, 2).tolist():
        if not (0 <= row < ROWS and 0 <= column < COLUMNS):
            board = f"the board's {ROWS} rows and {COLUMNS} columns"
            raise UserError(f"reset option {name} holds the cell ({row}, {column}), which lies outside {board}")
        if not allowed[row, column]:
            choices = ", ".join(f"({r}, {c})" for r, c in np.argwhere(allowed).tolist())
            raise UserError(f"reset option {name} holds the cell ({row}, {column}); it may hold {choices}")


def check_apples(values: NDArray[np.int64]) -> None:
    """Raise UserError unless cells [num_envs, 10, 2] are cells where apples grow, without repetition in an episode."""
    check_cells("apple_cells", values, MAY_GROW)
    for chosen in values.tolist():
        if len({tuple(cell) for cell in chosen}) < APPLES:
            raise UserError(f"reset option apple_cells holds a cell twice; it must hold {APPLES} different ones")


def render_board(colour: Callable[[Any, int, int], tuple[int, int, int]], s: Any, scale: int = 24) -> NDArray[np.uint8]:
    """The whole board with a margin, and a frame around the view of the player."""
    margin = VIEW // 2
    rows, columns = range(-margin, ROWS + margin), range(-margin, COLUMNS + margin)
    small = np.array([[colour(s, r, c) for c in columns] for r in rows], np.uint8)
    outside = np.pad(np.zeros((ROWS, COLUMNS), bool), margin, constant_values=True)
    small[outside] = 240
    large = small.repeat(scale, 0).repeat(scale, 1)
    top, left = scale * int(s["row"]), scale * int(s["column"])
    size, line = scale * VIEW, 3
    frame = np.ones((size, size), bool)
    frame[line:-line, line:-line] = False
    large[top : top + size, left : left + size][frame] = (150, 60, 160)
    return large
