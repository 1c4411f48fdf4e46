"""Evaluation: whole games, fair quotas, fresh seeds, the protocol beside the number."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import bestiary
from bestiary.algos import Dqn
from bestiary.algos.base import Agent
from bestiary.cli import main
from bestiary.commands.eval import print_report
from bestiary.cores import Lstm
from bestiary.display import Lines
from bestiary.envs import Atari, Catch, TMaze
from bestiary.evaluation import human_normalised, play, reference_scores
from bestiary.experiment import Evaluation, Experiment
from bestiary.extras import MissingExtra, require
from bestiary.presets import preset
from bestiary.runtime import Local
from bestiary.seeding import EVAL


class Still(Agent):
    """Never moves; counts its rows in its memory, forgetting at is_first as every agent must."""

    def initial_state(self, batch_size):
        return (torch.zeros(batch_size),)

    def act(self, step, state, explore, rng):
        age = torch.where(step.is_first, 0, state[0]) + 1
        self.ages = age
        return torch.ones(len(age), dtype=torch.long), {}, (age,)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    base = preset("catch")
    experiment = replace(
        base,
        algo=replace(base.algo, batch_size=4),
        runtime=Local(envs=4, threads=1),
        frames=2_000,
        evaluation=Evaluation(episodes=0),
    )
    return bestiary.train(experiment, tmp_path_factory.mktemp("e") / "run")


def test_every_slot_plays_its_share_so_short_games_are_not_favoured():
    world = Catch().make(4, 0, EVAL, 1)
    games = play(Still(), world, 10, "greedy", torch.Generator())
    assert [sum(e.slot == s for e in games) for s in range(4)] == [3, 3, 2, 2]
    assert all(e.steps == 9 for e in games)


def test_memory_is_carried_within_a_game_and_dropped_between_games():
    agent, world = Still(), Catch().make(2, 0, EVAL, 1)
    play(agent, world, 4, "greedy", torch.Generator())
    assert agent.ages.max() <= 10


def test_positive_only_replays_until_the_final_score_is_positive():
    world = Catch().make(4, 0, EVAL, 1)
    games = play(Still(), world, 8, "greedy", torch.Generator(), accept=lambda e: e.score > 0)
    assert [e.score for e in games] == [1.0] * 8


def test_positive_only_gives_up_in_a_sentence():
    world = Catch().make(2, 0, EVAL, 1)
    with pytest.raises(ValueError, match="had a positive score"):
        play(Still(), world, 2, "greedy", torch.Generator(), accept=lambda e: False)


def test_a_stopped_evaluation_returns_what_it_has():
    assert play(Still(), Catch().make(2, 0, EVAL, 1), 4, "greedy", torch.Generator(), stop=lambda: True) == []


def test_the_same_evaluation_twice_gives_the_same_scores(run):
    first, second, other = (bestiary.evaluate(run, 16, seed=s, threads=1) for s in (0, 0, 1))
    assert first["greedy"]["scores"] == second["greedy"]["scores"]
    assert first["sampled"]["scores"] == second["sampled"]["scores"]
    assert first["sampled"]["scores"] != other["sampled"]["scores"]


def test_repetitions_use_seeds_of_their_own(run):
    result = bestiary.evaluate(run, 16, runs=3, modes=("sampled",), threads=1)
    scores = result["sampled"]["scores"]
    assert len(scores) == 48
    assert not (scores[:16] == scores[16:32] == scores[32:])


def test_evaluation_refuses_nonsense(run):
    with pytest.raises(ValueError, match="at least 1"):
        bestiary.evaluate(run, 0)
    with pytest.raises(ValueError, match="has no checkpoint 'best'"):
        bestiary.evaluate(run, 1, checkpoint="best")


def test_success_stands_beside_what_is_possible_with_and_without_memory(tmp_path, capsys):
    base = preset("recall")
    small = replace(base.algo, batch_size=4)
    experiment = replace(
        base,
        env=TMaze(length=2),
        algo=small,
        runtime=Local(envs=4, threads=1),
        frames=1_000,
        evaluation=Evaluation(episodes=8),
    )
    run = bestiary.train(experiment, tmp_path / "run", Lines())
    assert ", success " in (last := capsys.readouterr().out.splitlines()[-1])
    assert last.endswith("(score: optimal 1.0, without memory 0.5)")
    result = bestiary.evaluate(run, 40, threads=1)
    assert result["references"] == {"metric": "score", "optimal": 1.0, "memoryless": 0.5}
    sampled = result["sampled"]
    assert sampled["success"]["n"] == 40
    won = [score > 0.4 for score in sampled["scores"]]  # 1, or 0.5 after a slip
    assert sampled["success"]["mean"] == np.mean(won)
    print_report(result, ("greedy", "sampled"))
    told = capsys.readouterr().out
    assert "score: optimal 1.0, without memory 0.5" in told
    assert re.search(r"sampled +success +40", told)


def test_a_run_can_be_played_elsewhere_than_it_was_trained(tmp_path, capsys):
    algo = Dqn(unroll=4, batch_size=4, warmup=50, capacity=200, ratio=0.02, head=(8,))
    experiment = Experiment(
        TMaze(length=3),
        algo,
        Lstm(hidden=4),
        runtime=Local(envs=4, threads=1),
        frames=500,
        evaluation=Evaluation(episodes=0),
    )
    run = bestiary.train(experiment, tmp_path / "run")
    # a maze of which no batch would fit into what the run remembers
    assert main(["eval", str(run.path), "--episodes", "4", "--env.length", "100", "--threads", "1"]) == 0
    assert "not as in training: length: 3 -> 100" in capsys.readouterr().out
    (report,) = run.path.glob("eval-*-length-100.json")
    result = json.loads(report.read_text())
    assert result["protocol"]["env"]["length"] == 100
    assert result["greedy"]["steps"]["min"] > 3 + 1
    assert run.experiment().env == experiment.env
    assert main(["eval", str(run.path), "--episodes", "4", "--threads", "1"]) == 0
    assert "not as in training" not in capsys.readouterr().out
    assert main(["eval", str(run.path), "env:catch"]) == 2  # other pictures, other network
    assert "another network" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "nowhere"), "--env.length", "100"]) == 2
    assert "none of the words is a run directory" in capsys.readouterr().err


def test_what_is_not_success_is_not_reported(run):
    result = bestiary.evaluate(run, 4, modes=("greedy",), threads=1)
    assert "references" not in result
    assert "success" not in result["greedy"]


def test_evaluation_keeps_what_belongs_to_the_whole_run(monkeypatch, tmp_path):
    """The run's seed reaches every evaluation; only the stream is another."""
    asked = []
    make = Catch.make
    monkeypatch.setattr(Catch, "make", lambda self, *args: asked.append(args) or make(self, *args))
    base = preset("catch")
    experiment = replace(
        base, algo=replace(base.algo, batch_size=4), runtime=Local(envs=4, threads=1), frames=1_000, seed=7,
        evaluation=Evaluation(episodes=2),
    )  # fmt: skip
    run = bestiary.train(experiment, tmp_path / "run")
    bestiary.evaluate(run, 2, runs=2, modes=("greedy",), threads=1)
    bestiary.evaluate(run, 2, seed=1, modes=("greedy",), threads=1)
    assert {seed for _, seed, *_ in asked} == {7}
    streams = [stream for _, _, stream, _ in asked]
    assert len(set(streams)) == len(streams) == 5  # training, its evaluation, two repetitions, another seed


def test_weights_of_another_network_are_refused(run, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    experiment = replace(run.experiment(), net=replace(run.experiment().net, prev_reward=False))
    (copy / "experiment.json").write_text(experiment.to_json())
    with pytest.raises(ValueError, match="another network"):
        bestiary.evaluate(copy, 1)


def test_human_normalised_scores_follow_the_published_tables():
    scores = reference_scores()
    assert human_normalised("Pong", 14.6) == pytest.approx(1.0)
    assert human_normalised("Pong", -20.7) == pytest.approx(0.0)
    assert human_normalised("Adventure", 1.0) is None
    medians = {}
    for column in ("impala_shallow", "impala_deep"):
        values = sorted(
            human_normalised(g, r[column]) for g, r in scores.items() if r["human"] and r[column] is not None
        )
        medians[column] = values[len(values) // 2]
    assert medians["impala_shallow"] == pytest.approx(0.9323, abs=5e-5)
    assert medians["impala_deep"] == pytest.approx(1.9182, abs=5e-5)


def test_an_atari_evaluation_reports_games_lives_and_human_normalised_scores(tmp_path):
    base = preset("pong")
    experiment: Experiment = replace(
        base,
        env=Atari(game="Breakout", time_limit_frames=600),
        algo=replace(base.algo, unroll=5, batch_size=2),
        runtime=Local(envs=2, threads=1),
        frames=80,
        evaluation=Evaluation(episodes=0),
    )
    run = bestiary.train(experiment, tmp_path / "run")
    result = bestiary.evaluate(run, 2, modes=("sampled",), threads=1)["sampled"]
    assert result["life"]["n"] >= result["game"]["n"] == 2
    assert result["life"]["mean"] * result["life"]["n"] == pytest.approx(result["game"]["mean"] * 2)
    assert result["human_normalised"] == pytest.approx((result["game"]["mean"] - 1.7) / (30.5 - 1.7))


def test_a_missing_extra_is_named_with_its_install_line():
    with pytest.raises(MissingExtra, match=r'pip install "bestiary\[wandb\]"'):
        require("a_module_that_is_not_there", "wandb")
