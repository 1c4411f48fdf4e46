"""Evaluation: complete episodes, quotas per slot, fresh seeds, and the protocol in the result."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.settings import configure

import bestiary
from bestiary.acting.episodes import EpsilonGreedyAgent, play_episodes
from bestiary.algos import Dqn
from bestiary.algos.base import Agent
from bestiary.cli.commands.eval import print_report
from bestiary.cli.main import main
from bestiary.config.experiment import Evaluation, Experiment, family
from bestiary.config.extras import MissingExtra, require
from bestiary.cores import Lstm
from bestiary.envs import Atari, Catch, TMaze
from bestiary.nets import Net
from bestiary.presets import preset
from bestiary.runtime import Local
from bestiary.seeding import EVAL, TRAIN
from bestiary.training.display import PlainDisplay
from bestiary.training.evaluation import human_normalised, reference_scores
from bestiary.types import TimeStep


class StayAgent(Agent):
    """Always chooses action 1. Its recurrent state counts the steps of the episode."""

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
        algo=configure(base.algo, batch_size=4),
        runtime=Local(envs=4, threads=1),
        frames=2_000,
        evaluation=Evaluation(episodes=0),
    )
    return bestiary.train(experiment, tmp_path_factory.mktemp("e") / "run")


def test_every_slot_has_a_quota_so_short_episodes_are_not_favoured():
    env_batch = Catch().make(4, 0, EVAL, 1)
    episodes = play_episodes(StayAgent(), env_batch, 10, "greedy", torch.Generator())
    assert [sum(e.slot == s for e in episodes) for s in range(4)] == [3, 3, 2, 2]
    assert all(e.steps == 9 for e in episodes)


def test_the_state_is_carried_within_episodes_and_reset_between_them():
    agent, env_batch = StayAgent(), Catch().make(2, 0, EVAL, 1)
    play_episodes(agent, env_batch, 4, "greedy", torch.Generator())
    assert agent.ages.max() <= 10


def test_positive_only_replaces_episodes_without_a_positive_score():
    env_batch = Catch().make(4, 0, EVAL, 1)
    episodes = play_episodes(StayAgent(), env_batch, 8, "greedy", torch.Generator(), accept=lambda e: e.score > 0)
    assert [e.score for e in episodes] == [1.0] * 8


def test_positive_only_stops_with_an_error_if_no_score_is_positive():
    env_batch = Catch().make(2, 0, EVAL, 1)
    with pytest.raises(ValueError, match="had a positive score"):
        play_episodes(StayAgent(), env_batch, 2, "greedy", torch.Generator(), accept=lambda e: False)


def test_a_cancelled_evaluation_returns_the_finished_episodes():
    assert (
        play_episodes(StayAgent(), Catch().make(2, 0, EVAL, 1), 4, "greedy", torch.Generator(), stop=lambda: True) == []
    )


@pytest.mark.parametrize("epsilon", [0.25, 1.0])
def test_epsilon_replaces_actions_by_uniformly_random_ones(epsilon):
    agent, n = EpsilonGreedyAgent(StayAgent(), epsilon, 4), 40_000
    nothing = torch.zeros(n)
    step = TimeStep(nothing, nothing.long(), nothing, nothing.bool(), nothing.bool())
    action, _, state = agent.act(step, agent.initial_state(n), None, torch.Generator().manual_seed(0))
    frequencies = torch.bincount(action, minlength=4) / n
    random_share = epsilon / 4
    torch.testing.assert_close(frequencies[[0, 2, 3]], torch.full((3,), random_share), atol=0.01, rtol=0)
    assert frequencies[1] == pytest.approx(1 - 3 * random_share, abs=0.01)  # its own action, or the same one by chance
    assert (state[0] == 1).all()  # the recurrent state is updated too


@pytest.mark.parametrize("name", family("algo"))
def test_epsilon_works_with_every_agent_and_uses_only_its_own_generator(name):
    spec = Catch().make(1, 0, EVAL, 1).spec
    agent = family("algo")[name]().agent(spec, Net(), Lstm(hidden=4))

    def scores(epsilon):
        env_batch, rng = Catch().make(4, 0, EVAL, 1), torch.Generator().manual_seed(0)
        return [e.score for e in play_episodes(agent, env_batch, 40, "greedy", rng, epsilon=epsilon)]

    before = torch.get_rng_state()
    assert scores(0.5) == scores(0.5) != scores(0.0)
    assert torch.get_rng_state().equal(before)


def test_epsilon_is_part_of_the_protocol(run, capsys):
    assert main(["eval", str(run.path), "--episodes", "4", "--threads", "1", "--epsilon", "0.5"]) == 0
    assert "actions are replaced by random ones with probability 0.5" in capsys.readouterr().out
    (file,) = run.path.glob("eval-*-1x4-seed0-epsilon0.5.json")
    assert json.loads(file.read_text())["protocol"]["epsilon"] == 0.5
    plain = bestiary.evaluate(run, 4, threads=1)
    assert plain["protocol"]["epsilon"] == 0
    assert plain["file"].endswith("-1x4-seed0.json")
    with pytest.raises(ValueError, match=r"^epsilon=1.5 must lie in \[0, 1\]"):
        bestiary.evaluate(run, 4, epsilon=1.5)
    with pytest.raises(ValueError, match=r"evaluation.epsilon=-0.1 must lie in \[0, 1\]"):
        Evaluation(epsilon=-0.1)


def test_epsilon_applies_to_evaluations_during_training(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(
        "bestiary.runtime.evaluation.play_episodes",
        lambda *args, **options: calls.append(options["epsilon"]) or play_episodes(*args, **options),
    )
    base = preset("catch")
    plan = Evaluation(every=400, episodes=2, epsilon=0.25)
    small = replace(base, algo=configure(base.algo, batch_size=4), runtime=Local(envs=4, threads=1))
    bestiary.train(replace(small, frames=1_000, evaluation=plan), tmp_path / "run")
    assert len(calls) > 1
    assert set(calls) == {0.25}


def test_the_same_evaluation_twice_gives_the_same_scores(run):
    first, second, other = (bestiary.evaluate(run, 16, seed=s, threads=1) for s in (0, 0, 1))
    assert first["greedy"]["scores"] == second["greedy"]["scores"]
    assert first["sampled"]["scores"] == second["sampled"]["scores"]
    assert first["sampled"]["scores"] != other["sampled"]["scores"]


def test_repeats_use_different_seeds(run):
    result = bestiary.evaluate(run, 16, repeats=3, modes=("sampled",), threads=1)
    scores = result["sampled"]["scores"]
    assert len(scores) == 48
    assert not (scores[:16] == scores[16:32] == scores[32:])


def test_evaluation_refuses_invalid_arguments(run):
    with pytest.raises(ValueError, match="at least 1"):
        bestiary.evaluate(run, 0)
    with pytest.raises(ValueError, match="has no checkpoint 'best'"):
        bestiary.evaluate(run, 1, checkpoint="best")


def test_success_is_reported_with_the_reference_values(tmp_path, capsys):
    base = preset("recall")
    small = configure(base.algo, batch_size=4)
    experiment = replace(
        base,
        env=TMaze(length=2),
        algo=small,
        runtime=Local(envs=4, threads=1),
        frames=1_000,
        evaluation=Evaluation(episodes=8),
    )
    run = bestiary.train(experiment, tmp_path / "run", PlainDisplay())
    assert ", success " in (last := capsys.readouterr().out.splitlines()[-1])
    assert last.endswith("(score: optimal 1.0, without memory 0.5)")
    result = bestiary.evaluate(run, 40, threads=1)
    assert result["references"] == {"metric": "score", "optimal": 1.0, "memoryless": 0.5}
    sampled = result["sampled"]
    assert sampled["success"]["n"] == 40
    successes = [score > 0.4 for score in sampled["scores"]]  # 1, or 0.5 after a wrong turn
    assert sampled["success"]["mean"] == np.mean(successes)
    print_report(result, ("greedy", "sampled"))
    printed = capsys.readouterr().out
    assert "score: optimal 1.0, without memory 0.5" in printed
    assert re.search(r"sampled +success +40", printed)


def test_a_run_can_be_evaluated_in_another_environment(tmp_path, capsys):
    algo = configure(Dqn, unroll=4, batch_size=4, warmup=50, capacity=200, updates_per_step=0.02, head=(8,))
    experiment = Experiment(
        TMaze(length=3),
        algo,
        Lstm(hidden=4),
        runtime=Local(envs=4, threads=1),
        frames=500,
        evaluation=Evaluation(episodes=0),
    )
    run = bestiary.train(experiment, tmp_path / "run")
    # a maze whose episodes would not fit into the replay buffer of the run
    assert main(["eval", str(run.path), "--episodes", "4", "--env.length", "100", "--threads", "1"]) == 0
    assert "not as in training: length: 3 -> 100" in capsys.readouterr().out
    (report,) = run.path.glob("eval-*-length-3-100.json")
    result = json.loads(report.read_text())
    assert result["protocol"]["env"]["length"] == 100
    assert result["greedy"]["episode_length"]["min"] > 3 + 1
    assert run.experiment().env == experiment.env
    assert main(["eval", str(run.path), "--episodes", "4", "--threads", "1"]) == 0
    assert "not as in training" not in capsys.readouterr().out
    assert main(["eval", str(run.path), "env:catch"]) == 2  # other observations need another network
    assert "another network" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "nowhere"), "--env.length", "100"]) == 2
    assert "no argument is a run directory" in capsys.readouterr().err


def test_success_is_not_reported_where_it_is_not_defined(run):
    result = bestiary.evaluate(run, 4, modes=("greedy",), threads=1)
    assert "references" not in result
    assert "success" not in result["greedy"]


def test_evaluations_use_the_seed_of_the_run_with_other_streams(monkeypatch, tmp_path):
    calls = []
    make = Catch.make
    monkeypatch.setattr(Catch, "make", lambda self, *args: calls.append(args) or make(self, *args))
    base = preset("catch")
    experiment = replace(
        base, algo=configure(base.algo, batch_size=4), runtime=Local(envs=4, threads=1), frames=1_000, seed=7,
        evaluation=Evaluation(episodes=2),
    )  # fmt: skip
    run = bestiary.train(experiment, tmp_path / "run")
    bestiary.evaluate(run, 2, repeats=2, modes=("greedy",), threads=1)
    bestiary.evaluate(run, 2, seed=1, modes=("greedy",), threads=1)
    assert {seed for _, seed, *_ in calls} == {7}
    streams = [stream for _, _, stream, _ in calls]
    assert len(set(streams)) == len(streams) == 5  # training, its evaluation, two repeats, another seed


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


def tiny_atari(**env) -> Experiment:
    base = preset("pong")
    return replace(
        base,
        env=Atari(game="Breakout", time_limit_frames=600, **env),
        algo=configure(base.algo, unroll=5, batch_size=2),
        runtime=Local(envs=2, threads=1),
        frames=80,
        evaluation=Evaluation(episodes=0),
    )


def test_an_atari_evaluation_reports_lives_and_human_normalised_scores(tmp_path):
    run = bestiary.train(tiny_atari(), tmp_path / "run")
    result = bestiary.evaluate(run, 2, modes=("sampled",), threads=1)["sampled"]
    assert result["life_return"]["n"] >= result["score"]["n"] == 2
    assert result["life_return"]["mean"] * result["life_return"]["n"] == pytest.approx(result["score"]["mean"] * 2)
    assert result["human_normalised"] == pytest.approx((result["score"]["mean"] - 1.7) / (30.5 - 1.7))


@pytest.mark.parametrize("trained", [False, True])
def test_a_run_can_be_evaluated_with_one_life_or_all_lives(trained, tmp_path):
    run = bestiary.train(tiny_atari(one_life=trained), tmp_path / "run")
    command = ["eval", str(run.path), "--episodes", "2", "--mode", "sampled", "--threads", "1"]
    lives = {}
    for flags, name in (([], "eval-*-sampled.json"), ([f"--env.{'no-' * trained}one-life"], "eval-*-one_life-*.json")):
        assert main(command + flags) == 0
        (file,) = run.path.glob(name)
        result = json.loads(file.read_text())
        lives[result["protocol"]["env"]["one_life"]] = result["sampled"]["life_return"]["n"]
        assert ("human_normalised" in result["sampled"]) == (not result["protocol"]["env"]["one_life"])
    assert lives[True] == 2 < lives[False]


@pytest.mark.parametrize(("lives", "trained", "one"), [
    ("as trained", False, False), ("as trained", True, True), ("all", True, False), ("one", False, True),
])  # fmt: skip
def test_evaluations_during_training_have_a_setting_for_lives(lives, trained, one, monkeypatch, tmp_path):
    calls = []
    make = Atari.make
    monkeypatch.setattr(Atari, "make", lambda self, *args: calls.append((args[2], self.one_life)) or make(self, *args))
    experiment = replace(tiny_atari(one_life=trained), evaluation=Evaluation(episodes=1, lives=lives))
    run = bestiary.train(experiment, tmp_path / "run")
    assert calls == [(TRAIN, trained), (EVAL, one)]
    assert (run.path / "evaluations.csv").read_text().count("\n") == 2


def test_lives_are_refused_where_there_are_none():
    with pytest.raises(ValueError, match=r"evaluation.lives='one' is for Atari games.* env:catch") as refusal:
        Experiment(evaluation=Evaluation(lives="one"))
    assert "\n" not in str(refusal.value)


def test_a_missing_extra_is_named_with_its_install_command():
    with pytest.raises(MissingExtra, match=r'pip install "bestiary\[wandb\]"'):
        require("a_module_that_is_not_there", "wandb")
