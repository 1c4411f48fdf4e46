"""The same experiment as processes of a Ray cluster. Nothing here is imported unless a cluster is asked for."""
