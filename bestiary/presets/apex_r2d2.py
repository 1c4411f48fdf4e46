"""Ape-X and R2D2: as in their papers, as in rela (Facebook's code for both), and for a small machine.

The papers count updates and transitions per second, not per move; `ratio` is what those rates come to. Both systems
play hundreds or thousands of environments at once: here the ladder of exploration has as many rungs as --runtime.envs
says.
Sequences of R2D2 may run from one episode into the next, where memory is emptied; none is padded.
"""

from dataclasses import replace

from bestiary.algos import Apex, R2d2
from bestiary.config.experiment import Checkpoints, Evaluation, Experiment
from bestiary.cores import Ff, Lstm
from bestiary.envs import Atari
from bestiary.nets import Net, Shallow
from bestiary.nets.optim import Adam, RmsProp, RmsPropTf
from bestiary.presets.memory_rl import quick_tmaze
from bestiary.runtime.config import Local, Overlap

PLAIN = Shallow(hidden_size=512, num_layers=0)  # straight from the convolutions
SMALL = Shallow(hidden_size=512)
NARROW = Shallow(hidden_size=256, filters=(16, 32, 32))  # learns a move in less than half the time

apex_paper = Experiment(
    env=Atari(game="Asterix", life_loss=True),
    algo=Apex(
        unroll=100,  # weights are renewed every 400 frames
        batch_size=512,
        capacity=2_000_000,
        warmup=50_000,
        ratio=19 / 12_500,  # updates and transitions per second
        discount=0.99,
        n_step=3,
        reward_clip="abs_one",
        period=2_500,
        alpha=0.6,
        beta=0.4,
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
        unroll=40,
        batch_size=64,
        window=120,
        burn_in=40,
        capacity=4_000_000,
        warmup=50_000,
        ratio=5 / 66_600,  # updates and moves per second
        discount=0.997,
        n_step=5,
        rescale=1e-3,
        period=2_500,
        alpha=0.9,
        beta=0.6,
        eta=0.9,
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
        unroll=20,
        warmup=80_000,
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
        warmup=4_000 * 80,  # it counts sequences
        n_step=3,
        rescale=None,
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
        unroll=8,
        batch_size=32,
        capacity=200_000,  # 1.4 GB
        warmup=10_000,
        ratio=1 / 4,  # every move is trained eight times
        discount=0.99,
        n_step=3,
        reward_clip="abs_one",
        period=1_000,
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
        unroll=20,
        batch_size=8,
        window=40,
        burn_in=20,
        capacity=200_000,
        warmup=10_000,
        ratio=1 / 40,
        discount=0.99,
        n_step=3,
        reward_clip="abs_one",
        rescale=None,
        period=1_000,
        head=(),
        huber=True,
        grad_norm=10.0,
        optimizer=Adam(lr=2e-4, eps=1.5e-4),
    ),
    core=Lstm(hidden=256),
    net=Net(encoder=NARROW, init="orthogonal"),
)

# sequences of ten moves in a corridor of fifty: the cue reaches the junction through stored memory alone
tmaze_r2d2 = replace(
    quick_tmaze(50),
    algo=R2d2(
        unroll=10,
        batch_size=32,
        window=10,
        burn_in=0,
        stored_state=True,
        capacity=20_000,  # memories stored longer ago are those of another network
        warmup=5_000,
        ratio=0.02,
        discount=1.0,
        n_step=5,
        rescale=None,
        tau=0.01,
        period=None,
        head=(64,),
        grad_norm=1.0,
        optimizer=Adam(lr=1e-3),
        memory_lr=2e-4,  # so that they stay alike
        lr_decay="linear",  # what was solved stays solved
    ),
    frames=400_000,
    evaluation=Evaluation(every=20_000, episodes=50),
)
