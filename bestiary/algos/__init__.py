"""Algorithms. One file each; a new one is its file and its name in this union."""

from bestiary.algos.impala import Impala

AlgoConfig = Impala
