"""Loads the reference policy of IMPALA's KL penalty (`algo.reference-run`) from its run directory."""

from bestiary.algos.base import load_weights
from bestiary.algos.impala import Impala, ImpalaAgent, ImpalaLearner
from bestiary.errors import UserError
from bestiary.training.run import Run


def load_reference(learner: ImpalaLearner) -> None:
    """Give the learner the policy that `algo.reference-run` names, from that run's last checkpoint.

    The reference policy is not trained. It must choose among the same actions, have no recurrent core, and see as many
    frames as the learner's policy, so that the frame stacks stored in trajectories serve both.
    """
    path, agent = learner.cfg.reference_run, learner.agent
    if path is None:
        return
    setting, spec = f"algo.reference-run={path}", agent.spec
    run = Run(path)
    experiment, checkpoint = run.experiment(), run.load()
    if not isinstance(experiment.algo, Impala):
        raise UserError(f"{setting} was trained by {type(experiment.algo).__name__}: name a run of IMPALA")
    actions = len(checkpoint.weights["policy.weight"])
    if actions != spec.num_actions:
        raise UserError(f"{setting} chooses among {actions} actions, {spec.name} has {spec.num_actions}")
    policy: ImpalaAgent = experiment.algo.agent(spec, experiment.net, experiment.core)
    if not policy.torso.memoryless or experiment.net.frame_stack != agent.torso.net.frame_stack:
        raise UserError(
            f"{setting} must be a run without a recurrent core (core:ff) that sees as many frames as this one: "
            f"--net.frame-stack {agent.torso.net.frame_stack}"
        )
    load_weights(policy, checkpoint.weights, f"than {path} describes")
    policy = policy.to(agent.policy.weight.device).eval().requires_grad_(False)
    learner.set_reference(policy, checkpoint.meta["frames"])
