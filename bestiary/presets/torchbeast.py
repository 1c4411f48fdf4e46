"""The published commands of TorchBeast (Küttler et al. 2019). It counts agent steps; frames are four times as many."""

from dataclasses import replace

from bestiary.algos import Impala
from bestiary.config.experiment import Evaluation, Experiment
from bestiary.cores import Ff
from bestiary.envs import Atari
from bestiary.nets import Net, Resnet, Shallow
from bestiary.nets.optim import RmsProp
from bestiary.replay import Fifo
from bestiary.runtime.config import Local

FRAME_SKIP = 4

# python -m torchbeast.monobeast --env PongNoFrameskip-v4
monobeast = Experiment(
    env=Atari(game="Pong", life_loss=True),
    algo=Impala(
        replay=Fifo(batch_size=8, capacity=None),  # trajectories; twice the actors, as its num_buffers
        unroll=80,  # agent steps
        discount=0.99,
        reward_clip="abs_one",
        baseline_cost=0.5,
        entropy_cost=0.0006,
        reduction="sum",
        grad_norm=40.0,
        lr_decay="linear",  # to 0 at total_steps
        optimizer=RmsProp(lr=4.8e-4, alpha=0.99, eps=0.01, momentum=0.0),
    ),
    core=Ff(),  # --use_lstm: core:lstm --core.hidden None --core.layers 2
    net=Net(encoder=Shallow(hidden_size=512), frame_stack=4, prev_action=True, prev_reward=True),
    runtime=Local(envs=4),  # num_actors
    frames=100_000 * FRAME_SKIP,  # total_steps
    evaluation=Evaluation(episodes=10),  # 10 episodes in its test mode
)

# python -m torchbeast.monobeast --num_actors 45 --total_steps 30000000 --learning_rate 0.0004 --epsilon 0.01
#   --entropy_cost 0.01 --batch_size 4 --unroll_length 80 --num_buffers 60 --num_threads 4
monobeast_45 = replace(
    monobeast,
    algo=replace(
        monobeast.algo,
        replay=Fifo(batch_size=4, capacity=60),  # trajectories; num_buffers
        entropy_cost=0.01,
        optimizer=RmsProp(lr=4e-4, alpha=0.99, eps=0.01, momentum=0.0),
    ),
    runtime=Local(envs=45),
    frames=30_000_000 * FRAME_SKIP,
)

# python -m torchbeast.polybeast
polybeast = replace(
    monobeast,
    net=Net(
        encoder=Resnet(hidden_size=256),
        frame_stack=4,
        prev_action=False,  # its residual network gets the last reward only
        prev_reward=True,
    ),
)

# docker run torchbeast: --num_actors 10 --total_steps 200000000 --unroll_length 60 --batch_size 32
polybeast_docker = replace(
    polybeast,
    # max_learner_queue_size = batch_size
    algo=replace(polybeast.algo, replay=Fifo(batch_size=32, capacity=32), unroll=60),
    runtime=Local(envs=10),
    frames=200_000_000 * FRAME_SKIP,
)
