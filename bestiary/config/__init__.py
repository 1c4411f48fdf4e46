"""Settings as frozen dataclasses: their schema, names of earlier versions, and the experiment that holds them all."""
