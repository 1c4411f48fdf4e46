"""The Ray runtime: one experiment as processes of a Ray cluster. It is imported only for `runtime:ray`."""
