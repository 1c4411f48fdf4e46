"""Every algorithm learns a small task in seconds; without memory it must fail on a memory task."""

from dataclasses import replace

import pytest
from helpers.settings import configure

import bestiary
from bestiary.algos import Apex, R2d2, SacDiscrete
from bestiary.config.experiment import Evaluation, Experiment, family
from bestiary.cores import DeltaNet, DeltaRnn, Ff, Gpt, Gru, LinearTransformer, Lstm, RecurrentDeltaNet
from bestiary.envs import Recall
from bestiary.nets import Mlp
from bestiary.nets.optim import Adam
from bestiary.presets import preset
from bestiary.presets.memory_rl import quick_tmaze
from bestiary.runtime import Local

pytestmark = pytest.mark.learns


def score(experiment: Experiment, path) -> float:
    run = bestiary.train(replace(experiment, evaluation=Evaluation(episodes=0)), path)
    return bestiary.evaluate(run, 200, modes=("greedy",))["greedy"]["score"]["mean"]


RECALL = replace(preset("recall"), env=Recall(delay=6), frames=200_000)


def test_impala_with_an_lstm_solves_recall(tmp_path):
    assert score(RECALL, tmp_path / "run") > 0.95


SMALL = {"width": 64, "layers": 1, "feedforward": 128}
MEMORIES = {
    "gru": Gru(hidden=64, chrono=20),
    "gpt": Gpt(**SMALL, window=16, positions="learned"),
    "linear-transformer": LinearTransformer(**SMALL),
    "delta-net": DeltaNet(**SMALL),
    "recurrent-delta-net": RecurrentDeltaNet(**SMALL),
    "delta-rnn": DeltaRnn(**SMALL),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_impala_solves_recall_with_every_memory(tmp_path, name):
    assert set(MEMORIES) | {"ff", "lstm"} == set(family("core"))
    algo = replace(RECALL.algo, optimizer=Adam(lr=5e-3 if name == "gru" else 2e-3))
    assert score(replace(RECALL, core=MEMORIES[name], algo=algo), tmp_path / "run") > 0.95


def test_impala_without_memory_stays_at_chance_on_recall(tmp_path):
    assert score(replace(RECALL, core=Ff()), tmp_path / "run") < 0.4  # chance is 0.25


TMAZE = quick_tmaze(5, episodes=1_500)


def test_dqn_with_an_lstm_solves_the_tmaze(tmp_path):
    algo = replace(TMAZE.algo, optimizer=Adam(lr=5e-3))
    assert score(replace(TMAZE, core=Lstm(hidden=32, chrono=12), algo=algo), tmp_path / "run") > 0.95


def test_dqn_with_a_delta_net_finds_the_cue_of_the_active_tmaze(tmp_path):
    assert score(quick_tmaze(5, active=True), tmp_path / "run") > 0.95


def test_dqn_without_memory_stays_at_chance_in_the_tmaze(tmp_path):
    assert score(replace(TMAZE, core=Ff()), tmp_path / "run") < 0.7  # chance is 0.5, 200 episodes


def test_dqn_without_memory_solves_the_tmaze_with_the_oracle(tmp_path):
    assert score(replace(TMAZE, env=replace(TMAZE.env, oracle=True), core=Ff()), tmp_path / "run") > 0.95


def test_sac_discrete_solves_recall(tmp_path):
    algo = configure(
        SacDiscrete, unroll=8, batch_size=32, capacity=50_000, updates_per_step=0.05, temperature=0.02, head=(64,),
        shared_encoder=True, freeze_critic=True, optimizer=Adam(lr=2e-3),
    )  # fmt: skip
    core = DeltaNet(**SMALL, feature_map="silu", beta_bias=2.0)
    assert score(replace(RECALL, algo=algo, core=core, frames=40_000), tmp_path / "run") > 0.95


APEX = configure(
    Apex,
    unroll=10,
    batch_size=64,
    burn_in=0,
    capacity=50_000,
    warmup=2_000,
    updates_per_step=0.05,
    target_update_period=100,
    head=(64,),
    optimizer=Adam(lr=1e-3),
)


def test_apex_solves_catch(tmp_path):
    catch = replace(preset("catch"), algo=APEX, frames=25_000, runtime=Local(envs=16))
    assert score(catch, tmp_path / "run") > 0.95


# episodes have six steps, sequences four: where the question is trained, the cue lies before the sequence
R2D2 = replace(
    RECALL,
    env=Recall(delay=4),
    algo=configure(
        R2d2,
        unroll=4,
        batch_size=32,
        sequence_length=4,
        burn_in=0,
        capacity=50_000,
        warmup=4_000,
        updates_per_step=0.05,
        discount=0.99,
        n_step=3,
        value_rescale_eps=None,
        target_update_period=100,
        head=(64,),
        optimizer=Adam(lr=2e-3),
    ),
    runtime=Local(envs=16),
    frames=25_000,
)
R2D2_CORES = {
    "lstm": Lstm(hidden=64, chrono=20),
    "delta-net": DeltaNet(width=32, layers=1, heads=4, feedforward=64, feature_map="silu", beta_bias=2.0),
}


@pytest.mark.parametrize("name", R2D2_CORES)
def test_r2d2_carries_a_cue_into_sequences_that_do_not_show_it(tmp_path, name):
    assert score(replace(R2D2, core=R2D2_CORES[name]), tmp_path / "run") > 0.95


def test_r2d2_without_stored_memory_and_burn_in_does_worse(tmp_path):
    algo = configure(R2D2.algo, stored_state=False)
    assert score(replace(R2D2, core=R2D2_CORES["delta-net"], algo=algo), tmp_path / "run") < 0.8


def test_r2d2_without_memory_stays_at_chance_on_recall(tmp_path):
    assert score(replace(R2D2, core=Ff()), tmp_path / "run") < 0.4  # chance is 0.25


@pytest.mark.long
def test_dqn_without_memory_improves_on_cartpole(tmp_path):
    assert score(replace(preset("cartpole-dqn"), frames=30_000), tmp_path / "run") > 100  # random policy: 22


@pytest.mark.long
def test_impala_with_an_lstm_solves_catch(tmp_path):
    assert score(replace(preset("catch"), core=Lstm(hidden=32)), tmp_path / "run") > 0.9


def test_impala_improves_on_cartpole(tmp_path):
    assert score(preset("cartpole"), tmp_path / "run") > 100  # random policy: 22


def test_a_deeper_torso_learns_too(tmp_path):
    deep = replace(preset("catch").net, encoder=Mlp(hidden_size=32, num_layers=3))
    assert score(replace(preset("catch"), net=deep), tmp_path / "run") > 0.9
