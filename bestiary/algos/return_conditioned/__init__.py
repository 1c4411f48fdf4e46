"""Return-conditioned policies: what Upside-Down RL and Reward-Conditioned Policies share."""
