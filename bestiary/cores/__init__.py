"""Recurrent cores, one file each. A new core is added as a file and as a member of `CoreConfig`."""

from bestiary.cores.delta_net import DeltaNet
from bestiary.cores.delta_rnn import DeltaRnn
from bestiary.cores.ff import Ff
from bestiary.cores.gpt import Gpt
from bestiary.cores.gru import Gru
from bestiary.cores.linear_transformer import LinearTransformer
from bestiary.cores.lstm import Lstm
from bestiary.cores.recurrent_delta_net import RecurrentDeltaNet

CoreConfig = Ff | Lstm | Gru | Gpt | LinearTransformer | DeltaNet | RecurrentDeltaNet | DeltaRnn
