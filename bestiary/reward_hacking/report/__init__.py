"""The HTML report of a reward-hacking study."""
