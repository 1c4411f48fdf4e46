"""Ape-X and R2D2: as in their papers, as in rela (Facebook's code for both), and for a small machine.

The papers give updates and transitions per second; `updates_per_step` is their ratio. Both systems play hundreds or
thousands of environments at once: here the per-actor epsilon schedule spans as many environments as --runtime.envs
says. Sequences of R2D2 may span several episodes, and the recurrent state is reset between them; none is padded.
"""

from dataclasses import replace

from bestiary.algos import Apex, R2d2
from bestiary.config.experiment import Checkpoints, Evaluation, Experiment
from bestiary.cores import Ff, Lstm
from bestiary.envs import Atari
from bestiary.nets import Net, Shallow
from bestiary.nets.optim import Adam, RmsProp, RmsPropTf
from bestiary.presets.memory_rl import quick_tmaze
from bestiary.replay import Prioritized
from bestiary.runtime.config import Local, Overlap

PLAIN = Shallow(hidden_size=512, num_layers=0)  # straight from the convolutions
SMALL = Shallow(hidden_size=512)
NARROW = Shallow(hidden_size=256, filters=(16, 32, 32))  # an update takes less than half the time

APEX_REPLAY = Prioritized(
    batch_size=512,  # transitions
    capacity=2_000_000,
    warmup=50_000,
    updates_per_step=19 / 12_500,  # updates and transitions per second
    priority_exponent=0.6,
    importance_exponent=0.4,
)
R2D2_REPLAY = Prioritized(
    batch_size=64,  # sequences
    capacity=4_000_000,
    warmup=50_000,
    updates_per_step=5 / 66_600,  # updates and transitions per second
    priority_exponent=0.9,
    importance_exponent=0.6,
    sequence_length=120,
    stored_state=None,
    eta=0.9,
)

apex_paper = Experiment(
    env=Atari(game="Asterix", life_loss=True),
    algo=Apex(
        replay=APEX_REPLAY,
        unroll=100,  # actors get new weights every 400 frames
        discount=0.99,
        n_step=3,
        reward_clip="abs_one",
        target_update_period=2_500,
        head=(512,),
        grad_norm=40.0,
        optimizer=RmsPropTf(lr=2.5e-4 / 4, alpha=0.95, eps=1.5e-7, centred=True),
    ),
    core=Ff(),
    net=Net(encoder=PLAIN, frame_stack=4, prev_action=False, prev_reward=False),
    runtime=Overlap(envs=360),
    frames=22_800_000_000,
    evaluation=Evaluation(every=10_000_000, episodes=30, background=True, epsilon=1e-3),
    checkpoint=Checkpoints(best=5),
)

r2d2_paper = replace(
    apex_paper,
    env=Atari(game="Asterix", life_loss=False, full_actions=True),
    algo=R2d2(
        replay=R2D2_REPLAY,
        unroll=40,
        burn_in=40,
        discount=0.997,
        n_step=5,
        value_rescale_eps=1e-3,
        target_update_period=2_500,
        head=(512,),
        grad_norm=40.0,
        optimizer=Adam(lr=1e-4, eps=1e-3),
    ),
    core=Lstm(hidden=512),
    net=Net(encoder=PLAIN, frame_stack=4),
    runtime=Overlap(envs=256),
    frames=10_000_000_000,
)

apex_rela = replace(
    apex_paper,
    env=Atari(game="Asterix", one_life=True, full_actions=True),
    algo=replace(
        apex_paper.algo,
        replay=replace(APEX_REPLAY, warmup=80_000),
        unroll=20,
        discount=0.997,
        huber=True,
        head=(),
        optimizer=RmsProp(lr=6.25e-5, alpha=0.99, eps=1.5e-7),  # a far smaller epsilon than the paper's inside the root
    ),
    net=replace(apex_paper.net, encoder=SMALL),
    evaluation=Evaluation(every=10_000_000, episodes=10, background=True),
)

r2d2_rela = replace(
    apex_rela,
    algo=replace(
        r2d2_paper.algo,
        replay=replace(R2D2_REPLAY, warmup=4_000 * 80),  # it counts sequences
        n_step=3,
        value_rescale_eps=None,
        reward_clip="abs_one",
        huber=True,
        head=(),
    ),
    core=Lstm(hidden=512),
    net=replace(apex_paper.net, encoder=PLAIN),
)

# -- a small machine --------------------------------------------------------------------------------------------------

apex_small = Experiment(
    env=Atari(game="Pong"),
    algo=Apex(
        replay=Prioritized(
            batch_size=32,
            capacity=200_000,  # 1.4 GB
            warmup=10_000,
            updates_per_step=1 / 4,  # every transition is trained eight times
        ),
        unroll=8,
        discount=0.99,
        n_step=3,
        reward_clip="abs_one",
        target_update_period=1_000,
        head=(),
        huber=True,
        grad_norm=10.0,
        optimizer=Adam(lr=2e-4, eps=1.5e-4),
    ),
    core=Ff(),
    net=Net(encoder=NARROW, frame_stack=4, prev_action=False, prev_reward=False, init="orthogonal"),
    runtime=Local(envs=32),
    frames=2_000_000,  # = 500k agent steps
    evaluation=Evaluation(every=400_000, episodes=8),
)

r2d2_small = replace(
    apex_small,
    algo=R2d2(
        replay=replace(
            R2D2_REPLAY,
            batch_size=8,
            capacity=200_000,
            warmup=10_000,
            updates_per_step=1 / 40,
            sequence_length=40,
        ),
        unroll=20,
        burn_in=20,
        discount=0.99,
        n_step=3,
        reward_clip="abs_one",
        value_rescale_eps=None,
        target_update_period=1_000,
        head=(),
        huber=True,
        grad_norm=10.0,
        optimizer=Adam(lr=2e-4, eps=1.5e-4),
    ),
    core=Lstm(hidden=256),
    net=Net(encoder=NARROW, init="orthogonal"),
)

# sequences of ten steps in a corridor of fifty: the cue reaches the junction through stored recurrent state alone
tmaze_r2d2 = replace(
    quick_tmaze(50),
    algo=R2d2(
        replay=replace(
            R2D2_REPLAY,
            batch_size=32,
            capacity=20_000,  # recurrent state stored longer ago comes from a network that has changed too much
            warmup=5_000,
            updates_per_step=0.02,
            sequence_length=10,
            stored_state=True,
        ),
        unroll=10,
        burn_in=0,
        discount=1.0,
        n_step=5,
        value_rescale_eps=None,
        tau=0.01,
        target_update_period=None,
        head=(64,),
        grad_norm=1.0,
        optimizer=Adam(lr=1e-3),
        core_lr=2e-4,  # so that stored recurrent state stays close to what the core would compute now
        lr_decay="linear",  # without it a solved task may be unlearnt
    ),
    frames=400_000,
    evaluation=Evaluation(every=20_000, episodes=50),
)
