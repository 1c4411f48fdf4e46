"""It learns, in seconds; and without memory it must not, where memory is what the task asks for."""

from dataclasses import replace

import pytest

import bestiary
from bestiary.cores import Ff, Lstm
from bestiary.envs import Recall
from bestiary.experiment import Evaluation, Experiment
from bestiary.nets import Mlp
from bestiary.presets import preset

pytestmark = pytest.mark.learns


def score(experiment: Experiment, path) -> float:
    run = bestiary.train(replace(experiment, evaluation=Evaluation(episodes=0)), path)
    return bestiary.evaluate(run, 200, modes=("greedy",))["greedy"]["game"]["mean"]


RECALL = replace(preset("recall"), env=Recall(delay=6), frames=200_000)


def test_impala_with_an_lstm_solves_recall(tmp_path):
    assert score(RECALL, tmp_path / "run") > 0.95


def test_impala_without_memory_stays_at_chance_on_recall(tmp_path):
    assert score(replace(RECALL, core=Ff()), tmp_path / "run") < 0.4  # chance is 0.25


def test_impala_with_an_lstm_solves_catch(tmp_path):
    assert score(replace(preset("catch"), core=Lstm(hidden=32)), tmp_path / "run") > 0.9


def test_impala_improves_on_cartpole(tmp_path):
    assert score(preset("cartpole"), tmp_path / "run") > 100  # random play: 22


def test_a_deeper_trunk_learns_too(tmp_path):
    deep = replace(preset("catch").net, encoder=Mlp(hidden_size=32, num_layers=3))
    assert score(replace(preset("catch"), net=deep), tmp_path / "run") > 0.9
