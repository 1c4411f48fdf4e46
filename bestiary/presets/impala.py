"""Espeholt et al. 2018, IMPALA: single-game Atari experts, 200M frames, no recurrent memory."""

from dataclasses import replace

from bestiary.algos import Impala
from bestiary.config.experiment import Evaluation, Experiment
from bestiary.cores import Ff
from bestiary.envs import Atari
from bestiary.nets import Net, Resnet, Shallow
from bestiary.nets.optim import RmsPropTf
from bestiary.replay import Fifo
from bestiary.runtime.config import Local

impala_shallow = Experiment(
    env=Atari(
        game="Pong",
        life_loss=True,  # a lost life ends the episode for the learner
        noop_max=30,  # 1-30 no-op actions at the start of a game, in training and evaluation
    ),
    algo=Impala(
        replay=Fifo(batch_size=32),  # trajectories
        unroll=20,  # agent steps
        discount=0.99,
        reward_clip="abs_one",  # to [-1, 1]
        baseline_cost=0.5,
        entropy_cost=0.01,
        reduction="sum",
        grad_norm=40.0,
        lr_decay="linear",  # to 0 at the end
        optimizer=RmsPropTf(
            lr=6e-4,
            alpha=0.99,
            eps=0.01,  # inside the root: the paper used TensorFlow
            momentum=0.0,
        ),
    ),
    core=Ff(),  # the paper's Atari networks have no LSTM
    net=Net(
        encoder=Shallow(hidden_size=512),
        frame_stack=4,  # frames
        prev_action=True,
        prev_reward=True,
    ),
    runtime=Local(envs=32),
    frames=200_000_000,  # = 50M agent steps
    evaluation=Evaluation(episodes=200),  # mean of 200 episodes
)

impala_deep = replace(
    impala_shallow,
    net=Net(encoder=Resnet(hidden_size=256), frame_stack=4, prev_action=True, prev_reward=True),
)
