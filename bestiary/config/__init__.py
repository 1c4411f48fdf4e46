"""Settings as frozen dataclasses: their schema, their names, and the whole of an experiment."""
