"""Trees of tensors keep their shape whatever is done to their leaves."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bestiary import tree


class Pair(NamedTuple):
    left: Tensor
    right: dict[str, Tensor]


def sample_tree(offset: float = 0.0) -> tuple:
    leaf = torch.arange(6.0).view(2, 3) + offset
    return (leaf, [leaf + 10, leaf + 20], {"a": leaf + 30}, Pair(leaf + 40, {"b": leaf + 50}), (), None)


def leaves(t: object) -> list[Tensor]:
    if isinstance(t, Tensor):
        return [t]
    branches = t.values() if isinstance(t, dict) else t or ()
    return [leaf for branch in branches for leaf in leaves(branch)]


def test_map_keeps_tuples_lists_dicts_and_names():
    first, second, third, fourth, empty, nothing = tree.map(lambda x: x * 2, sample_tree())
    base = torch.arange(6.0).view(2, 3)
    assert torch.equal(first, base * 2)
    assert type(second) is list
    assert torch.equal(second[1], (base + 20) * 2)
    assert type(third) is dict
    assert torch.equal(third["a"], (base + 30) * 2)
    assert type(fourth) is Pair
    assert torch.equal(fourth.right["b"], (base + 50) * 2)
    assert empty == ()
    assert nothing is None


def test_map_meets_corresponding_leaves_whatever_the_order_of_keys():
    a, b = torch.tensor(1.0), torch.tensor(2.0)
    out = tree.map(lambda x, y: x - y, {"a": a, "b": b}, {"b": a, "a": b})
    assert {k: v.item() for k, v in out.items()} == {"a": -1.0, "b": 1.0}


def test_map_does_not_change_what_it_was_given():
    before, after = sample_tree(), sample_tree()
    tree.map(lambda x: x + 1, after)
    assert all(torch.equal(x, y) for x, y in zip(leaves(before), leaves(after), strict=True))


def test_map_refuses_trees_of_different_length():
    x = torch.zeros(1)
    with pytest.raises(ValueError, match="zip"):
        tree.map(torch.add, (x, x), (x,))


def test_map_refuses_a_missing_name():
    x = torch.zeros(1)
    with pytest.raises(KeyError):
        tree.map(torch.add, {"a": x, "b": x}, {"a": x})


@pytest.mark.parametrize("dim", [0, 1])
def test_stack_adds_an_axis_to_every_leaf(dim):
    parts = [sample_tree(0), sample_tree(100), sample_tree(200)]
    stacked = tree.stack(parts, dim)
    assert type(stacked[3]) is Pair
    for i, part in enumerate(parts):
        for whole, leaf in zip(leaves(stacked), leaves(part), strict=True):
            assert torch.equal(whole.select(dim, i), leaf)


@pytest.mark.parametrize("dim", [0, 1])
def test_cat_and_narrow_are_inverses(dim):
    parts = [sample_tree(0), sample_tree(100)]
    width = (2, 3)[dim]
    joined = tree.cat(parts, dim)
    for i, part in enumerate(parts):
        again = tree.narrow(joined, dim, i * width, width)
        assert all(torch.equal(x, y) for x, y in zip(leaves(again), leaves(part), strict=True))


def test_cat_of_one_tree_is_that_tree():
    only = sample_tree()
    assert all(torch.equal(x, y) for x, y in zip(leaves(tree.cat([only])), leaves(only), strict=True))


def test_where_chooses_whole_batch_rows_in_leaves_of_any_rank():
    mask = torch.tensor([True, False, True])
    yes = (torch.ones(3), {"m": torch.ones(3, 2)}, torch.ones(3, 2, 2, dtype=torch.int64))
    no = tree.map(torch.zeros_like, yes)
    flat, named, deep = tree.where(mask, yes, no)
    assert flat.tolist() == [1, 0, 1]
    assert named["m"].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert deep.dtype == torch.int64
    assert deep.flatten(1).sum(1).tolist() == [4, 0, 4]


def test_where_of_an_empty_memory_is_empty():
    assert tree.where(torch.tensor([True]), (), ()) == ()


def test_to_device_moves_every_leaf():
    moved = tree.to_device(sample_tree(), torch.device("meta"))
    assert {leaf.device.type for leaf in leaves(moved)} == {"meta"}
    assert type(moved[3]) is Pair
