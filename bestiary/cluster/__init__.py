"""The same experiment as processes of a Ray cluster. Nothing here is imported unless `runtime:ray` is chosen."""
