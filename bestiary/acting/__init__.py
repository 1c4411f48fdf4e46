"""Acting: the actor, and small networks compiled for it."""
