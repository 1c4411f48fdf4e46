"""Memories. One file each; a new one is its file and its name in this union."""

from bestiary.cores.ff import Ff
from bestiary.cores.lstm import Lstm

CoreConfig = Ff | Lstm
