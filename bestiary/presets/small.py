"""Experiments that finish on a laptop."""

from dataclasses import replace

from bestiary.algos import Dqn, Impala
from bestiary.config.experiment import Evaluation, Experiment
from bestiary.cores import Ff, Lstm
from bestiary.envs import Atari, Catch, Gym, Recall, Riverraid
from bestiary.nets import Mlp, Net, Shallow
from bestiary.nets.optim import Adam, RmsProp
from bestiary.replay import Fifo, Uniform
from bestiary.runtime.config import Local

recall = Experiment(
    env=Recall(delay=10, cues=4),  # without memory: 0.25
    algo=Impala(
        replay=Fifo(batch_size=32),  # trajectories
        unroll=22,  # agent steps: two whole episodes
        discount=0.99,
        reward_clip="none",
        entropy_cost=0.01,
        reduction="mean",
        grad_norm=1.0,
        lr_decay="linear",
        optimizer=Adam(lr=5e-3),
    ),
    core=Lstm(hidden=64, chrono=20),  # steps: without it the gates forget too fast to learn at this learning rate
    # with the previous action an agent without memory could store the answer in its own actions
    net=Net(encoder=Mlp(hidden_size=64), prev_action=False, prev_reward=False),
    runtime=Local(envs=32),
    frames=400_000,  # = agent steps: no frame skip
    evaluation=Evaluation(every=50_000, episodes=200),
)

catch = replace(
    recall,
    env=Catch(rows=10, columns=5),
    algo=replace(recall.algo, replay=Fifo(batch_size=8), unroll=10, optimizer=Adam(lr=2e-3)),  # many small updates
    core=Ff(),
    net=Net(prev_action=True, prev_reward=True),
    frames=200_000,
    evaluation=Evaluation(episodes=200),
)

cartpole = replace(
    catch,
    env=Gym(id="CartPole-v1"),
    net=Net(encoder=Mlp(hidden_size=64, num_layers=2), prev_action=False, prev_reward=False),
    algo=replace(catch.algo, unroll=20, optimizer=Adam(lr=1e-3)),
    runtime=Local(envs=16),
    frames=300_000,
    evaluation=Evaluation(episodes=20),
)

cartpole_dqn = replace(
    cartpole,
    algo=Dqn(
        replay=Uniform(
            batch_size=16,  # sequences
            capacity=50_000,
            updates_per_step=0.2,
            sequence_length=8,  # a sequence may span several episodes
        ),
        unroll=4,
        discount=0.99,
        trace_decay=0.8,
        tau=0.01,
        huber=True,
        epsilon_last=0.05,
        epsilon_fraction=0.3,
        head=(128,),
        grad_norm=10.0,
        optimizer=Adam(lr=5e-4),
    ),
    frames=50_000,
)

pong = Experiment(
    env=Atari(game="Pong"),
    # short unrolls and many small updates: with T = 20 nothing was learnt for millions of frames
    algo=Impala(
        replay=Fifo(batch_size=16),  # trajectories: two updates per unroll
        unroll=5,  # agent steps
        discount=0.99,
        reward_clip="abs_one",
        baseline_cost=1.0,
        entropy_cost=0.01,
        reduction="mean",
        grad_norm=0.5,
        lr_decay="linear",
        optimizer=RmsProp(lr=7e-4, eps=1e-5),  # epsilon outside the root: a larger one dominates these small gradients
    ),
    core=Ff(),
    net=Net(encoder=Shallow(hidden_size=512), frame_stack=4, init="orthogonal"),
    runtime=Local(envs=32),
    frames=12_000_000,  # = 3M agent steps
    evaluation=Evaluation(every=2_000_000, episodes=8),
)

riverraid = replace(
    pong,
    # --env.reward pacifist:20 is the training reward; all rewards are recorded. Sticky actions make the game stochastic
    env=Riverraid(sticky=0.25),
    frames=8_000_000,  # = 2M agent steps
    evaluation=Evaluation(every=2_000_000, episodes=8),
)
