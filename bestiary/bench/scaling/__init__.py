"""How far a cluster scales: an analytic bound, a simulation and measurements."""
