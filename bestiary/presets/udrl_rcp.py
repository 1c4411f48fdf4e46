"""Upside-Down RL and Reward-Conditioned Policies on LunarLander: as published, as in the public code, and ours.

The public code alternates between twenty episodes and a number of updates: here these are updates per episode. It
keeps one episode in twenty for validation: here all are trained on. It cuts its worst episode where the buffer ends:
here that episode is dropped as a whole.
"""

from dataclasses import replace
from typing import Any

from bestiary.algos import Rcp, Udrl
from bestiary.config.experiment import Evaluation, Experiment
from bestiary.cores import Ff
from bestiary.envs import LunarLander
from bestiary.nets import Mlp, Net
from bestiary.nets.optim import Adam, AdamW
from bestiary.replay.episodes import Episodes
from bestiary.runtime.config import Local

RAW = Net(encoder=Mlp(num_layers=0), prev_action=False, prev_reward=False)  # no encoder

BEST_EPISODES = Episodes(
    batch_size=768, capacity=500, updates_per_step=5, update_unit="episode", warmup=50, keep="best"
)

udrl_paper = Experiment(
    env=LunarLander(),
    algo=Udrl(
        replay=BEST_EPISODES,
        command_source="uniform",
        command_episodes=75,
        max_return=320.0,
        network="gate",
        head=(32, 128, 128, 128),
        command_scale=(0.025, 0.01),
        grad_norm=None,
        optimizer=Adam(lr=3.5e-4),
        final_lr_fraction=1.0,
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
        replay=replace(
            BEST_EPISODES,
            capacity=100_000,
            max_transitions=100_000,
            sample_by="transitions",  # an episode of hovering counts as much as ten landings
            warmup=70,
        ),
        distinct_returns=True,
        grad_norm=100.0,
    ),
)

rcp_r_repo = replace(
    udrl_paper,
    algo=Rcp(
        replay=Episodes(
            batch_size=256,
            capacity=100_000,
            max_transitions=100_000,
            updates_per_step=50,
            update_unit="episode",
            warmup=70,
            keep="recent",
            sample_by="transitions",
        ),
        command="return-to-go",  # the label is the return-to-go, but the command stays the return of the first step
        fixed_command=True,
        command_source="maximum",
        network="gates",
        head=(64, 64),
        grad_norm=100.0,
        optimizer=Adam(lr=1e-3),
        final_lr_fraction=1.0,
    ),
    frames=4_000_000,
)

rcp_a_repo = replace(
    rcp_r_repo,
    algo=replace(
        rcp_r_repo.algo,
        command="advantage",
        resample_command=True,
        critic="joint",
        critic_head=(128, 64),
        critic_period=5,
        value_scale=1.0,
    ),
)

# -- ours -------------------------------------------------------------------------------------------------------------

rcp_a = Experiment(
    env=LunarLander(backend="envpool"),  # a shorter time limit makes hovering pay
    algo=Rcp(
        replay=Episodes(
            capacity=200,
            max_transitions=60_000,  # 200 episodes of hovering would leave room for nothing better for too long
            warmup=200,
            keep="recent",
            sample_by="transitions",
        ),
        discount=0.999,
        beta=0.5,
        normalise=True,
        label_smoothing=0.01,
        ema_decay=0.995,
        max_inverse_temperature=1.6,  # with more, episodes soon look alike, and landings become ever less safe
        inverse_temperature_steps=1_000_000,
        optimizer=AdamW(lr=1e-3),
    ),
    core=Ff(),
    net=RAW,
    runtime=Local(envs=64),
    frames=2_500_000,
    evaluation=Evaluation(every=250_000, episodes=50),
)

WHOLE_RETURN: dict[str, Any] = {  # conditioned on the episode's return and the horizon
    "replay": Episodes(
        capacity=350,  # few, so that episodes that were good a while ago do not hold the agent back
        updates_per_step=1 / 32,
        warmup=200,
        keep="mixture",
        best_episodes=70,
        latest_episodes=70,
        start_state_baseline=True,
    ),
    "command": "return",  # a return-to-go, after good or bad luck, may be one that was never seen from that state
    "horizon": True,
    "discount": 1.0,
    "fixed_command": False,
    "command_source": "episode",
    "command_episodes": 25,
    "max_return": 320.0,
    "command_shift": (100.0, 150.0),
    "command_scale": (1 / 100, 1 / 150),
    "normalise": True,
    "label_smoothing": 0.03,
    "ema_decay": 0.995,
    "max_inverse_temperature": 1.15,  # with more the policy became deterministic too early; with 1 it hovered for long
    "inverse_temperature_steps": 1_500_000,
    "optimizer": AdamW(lr=1e-3),
}

udrl = replace(
    rcp_a,
    algo=Udrl(**WHOLE_RETURN),
    frames=3_000_000,
    # a little less return, and more time, than the best episodes had: the agent lands more safely
    evaluation=replace(rcp_a.evaluation, command=(290.0, 400.0)),
)

udrl_sparse = replace(udrl, env=replace(udrl.env, sparse=True))

rcp_r = replace(
    udrl,
    # better episodes weigh more, and of two that land the quicker one is better: less hovering during training
    algo=Rcp(**WHOLE_RETURN | {"replay": replace(WHOLE_RETURN["replay"], length_penalty=0.1)}, beta=4.0),
    frames=4_000_000,
    # the score varies by more than fifty episodes can resolve
    evaluation=replace(udrl.evaluation, every=125_000, episodes=100, command=(290.0, 300.0)),
)
