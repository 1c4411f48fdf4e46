"""The Atari experiments of Irie et al. 2021, Going Beyond Linear Transformers with Recurrent Fast Weight Programmers.

The paper counts agent steps; frames are four times as many. Its code cuts the gradient through the fast weights after
every step. These presets backpropagate through the whole chunk; `--core.bptt 1` gives the published gradient.
"""

from dataclasses import replace

from bestiary.config.experiment import Checkpoints, Evaluation
from bestiary.cores import DeltaNet, DeltaRnn, Ff, LinearTransformer, Lstm, RecurrentDeltaNet
from bestiary.envs import Atari
from bestiary.nets.optim import RmsProp
from bestiary.presets.torchbeast import FRAME_SKIP, polybeast
from bestiary.replay import Fifo
from bestiary.runtime.config import Local

# --num_actors 48 --total_steps 200000000 --learning_rate 0.0006 --entropy_cost 0.01 --batch_size 32 --unroll_length 50
rfwp_ff = replace(
    polybeast,
    env=Atari(game="Gopher", life_loss=True),
    algo=replace(
        polybeast.algo,
        replay=Fifo(batch_size=32, capacity=32),  # trajectories; max_learner_queue_size = batch_size
        unroll=50,  # agent steps
        entropy_cost=0.01,
        optimizer=RmsProp(lr=6e-4, alpha=0.99, eps=0.01, momentum=0.0),
    ),
    core=Ff(),
    runtime=Local(envs=48),  # num_actors
    frames=200_000_000 * FRAME_SKIP,
    evaluation=Evaluation(episodes=30),  # its protocol: bestiary eval RUN --repeats 5 --episodes 30 --mode greedy
    checkpoint=Checkpoints(milestones=(50_000_000 * FRAME_SKIP,)),  # save_extra_checkpoint
)

rfwp_lstm = replace(rfwp_ff, core=Lstm(hidden=256))
rfwp_lt = replace(rfwp_ff, core=LinearTransformer(width=128, layers=2, heads=4, feedforward=512))
rfwp_delta_net = replace(rfwp_ff, core=DeltaNet(width=128, layers=2, heads=4, feedforward=512))
rfwp_rdn = replace(rfwp_ff, core=RecurrentDeltaNet(width=128, layers=2, heads=4, feedforward=512))
rfwp_delta_rnn = replace(rfwp_ff, core=DeltaRnn(width=128, layers=2, heads=4, feedforward=512))
