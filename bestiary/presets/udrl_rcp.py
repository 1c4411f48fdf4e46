"""Upside-Down RL and Reward-Conditioned Policies on LunarLander: as published, as in the public code, and ours.

The public code counts epochs of twenty episodes; updates per episode are what its updates per epoch come to. Of every
twenty episodes it keeps one for validation; here all are learnt from. Its worst episode is cut where the buffer ends;
here it goes as a whole.
"""

from dataclasses import replace
from typing import Any

from bestiary.algos import Rcp, Udrl
from bestiary.config.experiment import Evaluation, Experiment
from bestiary.cores import Ff
from bestiary.envs import LunarLander
from bestiary.nets import Mlp, Net
from bestiary.nets.optim import Adam, AdamW
from bestiary.runtime.config import Local

RAW = Net(encoder=Mlp(num_layers=0), prev_action=False, prev_reward=False)  # the eight numbers as they are

udrl_paper = Experiment(
    env=LunarLander(),
    algo=Udrl(
        batch_size=768,
        source="spread",
        top=75,
        max_return=320.0,
        keep="best",
        capacity=500,
        ratio=5,
        per="episode",
        warmup=50,
        network="gate",
        head=(32, 128, 128, 128),
        scale=(0.025, 0.01),
        grad_norm=None,
        optimizer=Adam(lr=3.5e-4),
        lr_last=1.0,
    ),
    core=Ff(),
    net=RAW,
    runtime=Local(envs=20),
    frames=10_000_000,
    evaluation=Evaluation(every=500_000, episodes=100),
)

udrl_repo = replace(
    udrl_paper,
    algo=replace(
        udrl_paper.algo,
        distinct=True,
        capacity=100_000,
        moves=100_000,
        draw="moves",  # an episode of hovering counts as much as ten landings
        warmup=70,
        grad_norm=100.0,
    ),
)

rcp_r_repo = replace(
    udrl_paper,
    algo=Rcp(
        batch_size=256,
        command="to-go",  # learnt as what is still to come, but held as it was at the start
        hold=True,
        source="peak",
        keep="recent",
        capacity=100_000,
        moves=100_000,
        ratio=50,
        per="episode",
        warmup=70,
        network="gates",
        head=(64, 64),
        grad_norm=100.0,
        optimizer=Adam(lr=1e-3),
        lr_last=1.0,
    ),
    frames=4_000_000,
)

rcp_a_repo = replace(
    rcp_r_repo,
    algo=replace(
        rcp_r_repo.algo,
        command="advantage",
        redraw=True,
        critic="joint",
        critic_head=(128, 64),
        critic_every=5,
        value_scale=1.0,
    ),
)

# -- ours -------------------------------------------------------------------------------------------------------------

rcp_a = Experiment(
    env=LunarLander(backend="envpool"),  # a shorter limit makes hovering pay
    algo=Rcp(
        discount=0.999,
        beta=0.5,
        moves=60_000,  # of two hundred episodes that hover it would be too long before anything better is all there is
        warmup=200,
        normalise=True,
        smoothing=0.01,
        average=0.995,
        sharpen=1.6,  # more of it, and all moves soon look alike: it lands ever less safely
        sharpen_over=1_000_000,
        optimizer=AdamW(lr=1e-3),
    ),
    core=Ff(),
    net=RAW,
    runtime=Local(envs=64),
    frames=2_500_000,
    evaluation=Evaluation(every=250_000, episodes=50),
)

TOLD: dict[str, Any] = {  # a whole return and the moves for it, learnt from the best of what is recent
    "command": "return",  # what is left of it, after good or bad luck, may be something that was never seen from there
    "horizon": True,
    "discount": 1.0,
    "hold": False,
    "source": "episode",
    "top": 25,
    "max_return": 320.0,
    "keep": "mixture",
    "capacity": 350,  # few, so that what was good a while ago does not hold it back
    "best": 70,
    "latest": 70,
    "draw": "episodes",
    "adjust": True,
    "ratio": 1 / 32,
    "warmup": 200,
    "shift": (100.0, 150.0),
    "scale": (1 / 100, 1 / 150),
    "normalise": True,
    "smoothing": 0.03,
    "average": 0.995,
    "sharpen": 1.15,  # with more it became sure before it was good, with none it hovered for long
    "sharpen_over": 1_500_000,
    "optimizer": AdamW(lr=1e-3),
}

udrl = replace(
    rcp_a,
    algo=Udrl(**TOLD),
    frames=3_000_000,
    # a little less, and with more time for it, than the episodes that were best: it lands more safely
    evaluation=replace(rcp_a.evaluation, command=(290.0, 400.0)),
)

udrl_sparse = replace(udrl, env=replace(udrl.env, sparse=True))

rcp_r = replace(
    udrl,
    # what was better counts more, and of two that land the quicker is better: less hovering on the way there
    algo=Rcp(**TOLD, beta=4.0, haste=0.1),
    frames=4_000_000,
    # it goes up and down by more than fifty games can tell
    evaluation=replace(udrl.evaluation, every=125_000, episodes=100, command=(290.0, 300.0)),
)
