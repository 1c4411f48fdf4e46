"""Encoders, frame stack, inputs of the core and heads: published sizes, and what is fed and what is not."""

import pytest
import torch
from helpers.learners import count
from torch import Tensor, nn

from bestiary.algos import Impala
from bestiary.cores import Ff, Lstm
from bestiary.nets import (
    Auto,
    Encoder,
    FrameStack,
    Mlp,
    Net,
    Resnet,
    Shallow,
    SmallCnn,
    Torso,
    choose_encoder,
    head,
)
from bestiary.types import Spec, State, TimeStep

VECTOR = Spec("vector", (3,), torch.float32, 4)
IMAGE = Spec("image", (2, 9, 7), torch.uint8, 4)


def atari(num_actions: int) -> Spec:
    return Spec("atari", (1, 84, 84), torch.uint8, num_actions, frames_per_step=4)


def agent(num_actions: int, net: Net, core: Ff | Lstm) -> nn.Module:
    with torch.device("meta"):  # sizes without numbers
        return Impala().agent(atari(num_actions), net, core)


# parameter counts -----------------------------------------------------------------------------------------------------

SHALLOW = Net(encoder=Shallow(), frame_stack=4)
DEEP = Net(encoder=Resnet(), frame_stack=4, prev_action=False)
MONOBEAST_LSTM = Lstm(hidden=None, layers=2)  # as wide as its input


def test_the_shallow_network_has_as_many_parameters_as_monobeasts():
    assert count(agent(6, SHALLOW, Ff())) == 1_687_768


@pytest.mark.parametrize(("num_actions", "added"), [(6, 4_318_080), (18, 4_519_872)])
def test_monobeasts_lstm_adds_as_many_parameters_as_it_should(num_actions, added):
    with_memory = agent(num_actions, SHALLOW, MONOBEAST_LSTM)
    assert count(with_memory) - count(agent(num_actions, SHALLOW, Ff())) == added
    assert count(with_memory.torso.core) == added
    assert with_memory.torso.width == 513 + num_actions


def test_the_deep_network_has_as_many_parameters_as_polybeasts():
    deep = agent(6, DEEP, Ff())
    assert count(deep) == 1_091_038
    assert count(deep.torso.encoder.convolutions) == 97_744
    assert count(deep.torso.encoder.layers) == 991_488
    assert deep.torso.width == 257


def test_the_deep_network_with_memory_has_as_many_parameters_as_polybeasts():
    deep = agent(6, DEEP, Lstm(hidden=256))
    assert count(deep) == 1_618_391
    assert count(deep.torso.core) == 527_360


# Pan et al. 2022, Riverraid, 18 actions: width, parameters of 1, 2, 3 fully connected layers, totals for 1 and 3
RIVERRAID = [
    (256, 803_072, 868_864, 934_656, 886_300, 1_017_884),
    (512, 1_606_144, 1_868_800, 2_131_456, 1_694_236, 2_219_548),
    (1024, 3_212_288, 4_261_888, 5_311_488, 3_310_108, 5_409_308),
    (2048, 6_424_576, 10_620_928, 14_817_280, 6_541_852, 14_934_556),
    (4096, 12_849_152, 29_630_464, 46_411_776, 13_005_340, 46_567_964),
]


@pytest.mark.parametrize("sizes", RIVERRAID, ids=lambda sizes: str(sizes[0]))
def test_the_misspecification_networks_have_the_published_sizes(sizes):
    width, *fully_connected, total_1, total_3 = sizes
    totals = {1: total_1, 3: total_3}
    for num_layers, expected in zip((1, 2, 3), fully_connected, strict=True):
        net = Net(encoder=Shallow(hidden_size=width, num_layers=num_layers), frame_stack=4)
        built = agent(18, net, Ff())
        assert count(built.torso.encoder.convolutions) == 77_984
        assert count(built.torso.encoder.layers) == expected
        heads = (width + 19) * 19 + 19
        assert count(built) == totals.get(num_layers, 77_984 + expected + heads)


# frame stack ----------------------------------------------------------------------------------------------------------


def stack_slowly(obs: Tensor, is_first: Tensor, before: Tensor, size: int) -> Tensor:
    """A plain frame stack: one list of frames per stream, refilled at every reset."""
    columns = []
    for b in range(obs.shape[1]):
        window = list(before[b])  # the last size - 1 frames
        stacked = []
        for t in range(len(obs)):
            frame = obs[t, b]
            window = [frame] * (size - 1) if is_first[t, b] else window
            stacked.append(torch.cat([*window, frame]))
            window = [*window, frame][1:]
        columns.append(torch.stack(stacked))
    return torch.stack(columns, 1)


def frames(*shape: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(256, (*shape, *IMAGE.obs_shape), generator=rng, dtype=torch.uint8)


def borders(T: int, B: int, density: float, seed: int = 0) -> Tensor:
    return torch.rand(T, B, generator=torch.Generator().manual_seed(seed)) < density


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("density", [0, 0.1, 0.5, 1])
def test_a_frame_stack_is_a_list_of_frames(size, density):
    T, B = 11, 6
    stack = FrameStack(IMAGE, size)
    obs, is_first = frames(T, B), borders(T, B, density)
    before = frames(B, size - 1, seed=1)
    out, (after,) = stack(obs, is_first, (before,))
    assert out.dtype == torch.uint8
    assert torch.equal(out, stack_slowly(obs, is_first, before, size))
    assert torch.equal(after, out.unflatten(2, (size, -1))[-1, :, 1:])


@pytest.mark.parametrize("cuts", [[1], [5], [2, 3, 9], list(range(1, 11))], ids=str)
def test_a_stacked_chunk_equals_its_pieces_and_single_steps(cuts):
    T, B, size = 11, 6, 4
    stack = FrameStack(IMAGE, size)
    obs, is_first = frames(T, B), borders(T, B, 0.2)
    start: State = (frames(B, size - 1, seed=1),)
    whole, final = stack(obs, is_first, start)
    state, pieces = start, []
    for piece, first in zip(obs.tensor_split(cuts), is_first.tensor_split(cuts), strict=True):
        out, state = stack(piece, first, state)
        pieces.append(out)
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(state[0], final[0])


def test_the_oldest_frame_comes_first_and_the_first_one_is_repeated():
    stack = FrameStack(Spec("pixel", (1, 1, 1), torch.uint8, 2), 3)
    obs = torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8).view(5, 1, 1, 1, 1)
    is_first = torch.tensor([1, 0, 0, 1, 0], dtype=torch.bool)[:, None]
    out, _ = stack(obs, is_first, stack.initial_state(1, torch.device("cpu")))
    assert out.flatten(1).tolist() == [[1, 1, 1], [1, 1, 2], [1, 2, 3], [4, 4, 4], [4, 4, 5]]


def test_a_stack_of_one_is_the_frame_itself_without_state():
    stack = FrameStack(IMAGE, 1)
    obs = frames(4, 2)
    out, state = stack(obs, borders(4, 2, 0.5), stack.initial_state(2, torch.device("cpu")))
    assert torch.equal(out, obs)
    assert state == ()


def test_an_empty_stack_has_the_type_of_the_observations():
    (empty,) = FrameStack(IMAGE, 4).initial_state(5, torch.device("cpu"))
    assert empty.shape == (5, 3, *IMAGE.obs_shape)
    assert empty.dtype == torch.uint8
    assert not empty.any()


# inputs of the core ---------------------------------------------------------------------------------------------------


def timestep(spec: Spec, T: int, B: int, density: float = 0.2, seed: int = 0) -> TimeStep:
    """Random time steps; at resets too they have a previous action, which must be ignored."""
    rng = torch.Generator().manual_seed(seed)
    if spec.obs_dtype == torch.uint8:
        obs = torch.randint(256, (T, B, *spec.obs_shape), generator=rng, dtype=torch.uint8)
    else:
        obs = torch.randn(T, B, *spec.obs_shape, generator=rng)
    return TimeStep(
        obs=obs,
        prev_action=torch.randint(spec.num_actions, (T, B), generator=rng),
        reward=3 * torch.randn(T, B, generator=rng),
        is_first=torch.rand(T, B, generator=rng) < density,
        is_terminal=torch.zeros(T, B, dtype=torch.bool),
    )


def shown(net: Net, step: TimeStep) -> tuple[Tensor, Tensor, Tensor]:
    """The input of the core: features, reward, action."""
    torso = Torso(VECTOR, net, Ff())
    out, _ = torso(step, torso.initial_state(step.is_first.shape[1]))
    width = torso.encoder.width
    rewards = int(net.prev_reward)
    return out[..., :width], out[..., width : width + rewards], out[..., width + rewards :]


def test_the_previous_action_is_fed_one_hot():
    step = timestep(VECTOR, 7, 5, density=0)
    _, _, action = shown(Net(encoder=Mlp(8)), step)
    for t in range(7):
        for b in range(5):
            assert action[t, b].tolist() == [float(a == step.prev_action[t, b]) for a in range(4)]


def test_no_action_is_fed_at_the_start_of_an_episode():
    step = timestep(VECTOR, 40, 5, density=0.3)
    _, _, action = shown(Net(encoder=Mlp(8)), step)
    assert not action[step.is_first].any()
    assert (action[~step.is_first].sum(-1) == 1).all()


def test_no_action_is_different_from_action_zero():
    step = timestep(VECTOR, 2, 1, density=0)
    step.prev_action[:] = 0
    step.is_first[0] = True
    _, _, action = shown(Net(encoder=Mlp(8)), step)
    assert action[:, 0].tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]


def test_the_fed_reward_is_clipped_to_minus_one_and_one():
    step = timestep(VECTOR, 5, 1, density=0)
    step.reward[:, 0] = torch.tensor([-100.0, -1.0, 0.25, 1.0, 7.5])
    _, reward, _ = shown(Net(encoder=Mlp(8)), step)
    assert reward.flatten().tolist() == [-1.0, -1.0, 0.25, 1.0, 1.0]


@pytest.mark.parametrize("prev_reward", [True, False])
@pytest.mark.parametrize("prev_action", [True, False])
def test_only_the_enabled_inputs_are_fed(prev_action, prev_reward):
    net = Net(encoder=Mlp(8), prev_action=prev_action, prev_reward=prev_reward)
    features, reward, action = shown(net, timestep(VECTOR, 3, 2))
    assert features.shape[-1] == 8
    assert reward.shape[-1] == int(prev_reward)
    assert action.shape[-1] == 4 * prev_action


def test_bytes_are_scaled_to_the_unit_interval_and_numbers_are_not():
    encoder = Encoder(Mlp(hidden_size=5), IMAGE, 1).double()
    obs = frames(3)
    by_hand = encoder.layers[0](obs.double().flatten(1) / 255).relu()
    torch.testing.assert_close(encoder(obs), by_hand)

    encoder = Encoder(Mlp(hidden_size=5), VECTOR, 1).double()
    obs = 100 * torch.randn(3, 3)
    torch.testing.assert_close(encoder(obs), encoder.layers[0](obs.double()).relu())


def test_every_fully_connected_layer_is_followed_by_a_rectifier():
    encoder = Encoder(Mlp(hidden_size=6, num_layers=3), VECTOR, 1)
    x = obs = torch.randn(10, 3)
    for layer in encoder.layers:
        x = layer(x).relu()
    assert len(encoder.layers) == 3
    torch.testing.assert_close(encoder(obs), x)


def test_the_small_network_ends_without_a_rectifier():
    encoder = Encoder(SmallCnn(hidden_size=6, num_layers=2), IMAGE, 1).double()
    x = encoder.convolutions(frames(4).double() / 255).flatten(1)
    by_hand = encoder.layers[1](encoder.layers[0](x).relu())
    torch.testing.assert_close(encoder(frames(4)), by_hand)
    assert (by_hand < 0).any()


@pytest.mark.parametrize("prev_reward", [True, False])
@pytest.mark.parametrize("prev_action", [True, False])
def test_action_and_reward_may_pass_a_layer_of_their_own(prev_action, prev_reward):
    net = Net(
        encoder=Mlp(8), action_units=5, reward_units=3, prev_action=prev_action, prev_reward=prev_reward, init="torch"
    )
    torso, step = Torso(VECTOR, net, Ff()), timestep(VECTOR, 30, 4)
    out, _ = torso(step, ())
    parts = [torso.encoder(step.obs.flatten(0, 1)).view(30, 4, -1)]
    if prev_reward:
        parts.append(torso.reward[0](step.reward.clamp(-1, 1)[..., None]).relu())
    if prev_action:
        one_hot = nn.functional.one_hot(step.prev_action, 4).float()
        one_hot[step.is_first] = 0
        parts.append(torso.action[0](one_hot).relu())
    torch.testing.assert_close(out, torch.cat(parts, -1))
    assert torso.width == 8 + 3 * prev_reward + 5 * prev_action


@pytest.mark.parametrize("name", ["action_units", "reward_units"])
def test_a_layer_of_no_units_is_refused(name):
    with pytest.raises(ValueError, match=rf"net\.{name.replace('_', '-')}=0 must be at least 1, or None for no layer"):
        Net(**{name: 0})


@pytest.mark.parametrize("init", ["torch", "orthogonal"])
def test_a_head_starts_with_nearly_no_preference(init):
    layers = [m for m in head(50, (40, 30), 7, last=1e-3, init=init) if isinstance(m, nn.Linear)]
    assert [(m.in_features, m.out_features) for m in layers] == [(50, 40), (40, 30), (30, 7)]
    last = torch.cat([layers[-1].weight.flatten(), layers[-1].bias])
    assert 0.8e-3 < last.abs().max() <= 1e-3
    for layer in layers[:-1]:
        w = layer.weight.double()
        if init == "orthogonal":
            torch.testing.assert_close(w @ w.T, 2 * torch.eye(len(w)).double(), atol=1e-5, rtol=0)
            assert not layer.bias.any()
        else:
            bound = layer.out_features**-0.5
            assert 0.95 * bound < w.abs().max() <= bound
            assert layer.bias.eq(torch.tensor(0.1)).all()


@pytest.mark.parametrize("hidden", [(), (5,), (6, 5)])
def test_a_head_has_rectifiers_between_its_layers_only(hidden):
    module = head(4, hidden, 3, last=1.0, init="torch")
    assert [type(m) for m in module] == [nn.Linear, nn.ReLU] * len(hidden) + [nn.Linear]


def residual_by_hand(x: Tensor, convolutions: nn.Sequential) -> Tensor:
    """IMPALA's deep network, figure 3 of the paper, from the weights alone."""
    weights = convolutions.parameters()

    def conv(x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, next(weights), next(weights), padding=1)

    for _ in range(3):
        x = nn.functional.max_pool2d(conv(x), 3, stride=2, padding=1)
        for _ in range(2):
            x = x + conv(conv(x.relu()).relu())
    assert next(weights, None) is None
    return x.relu()


def test_the_deep_network_is_the_one_in_the_figure():
    encoder = Encoder(Resnet(hidden_size=5), IMAGE, 2).double()
    obs = torch.cat([frames(4), frames(4, seed=1)], 1)
    by_hand = residual_by_hand(obs.double() / 255, encoder.convolutions).flatten(1)
    torch.testing.assert_close(encoder(obs), encoder.layers[0](by_hand).relu())


@pytest.mark.parametrize("core", [Ff(), Lstm(hidden=8), Lstm(hidden=8, layers=2)], ids=str)
@pytest.mark.parametrize("cuts", [[4], list(range(1, 9))], ids=str)
def test_a_torsos_chunk_equals_its_pieces(core, cuts):
    T, B = 9, 4
    torso = Torso(IMAGE, Net(encoder=SmallCnn(hidden_size=6), frame_stack=3), core).double()
    step = timestep(IMAGE, T, B)
    whole, final = torso(step, torso.initial_state(B))
    state, pieces = torso.initial_state(B), []
    for piece in zip(*(x.tensor_split(cuts) for x in step), strict=True):
        out, state = torso(TimeStep(*piece), state)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-9, atol=1e-12)


def test_the_recurrent_state_is_one_tuple_with_the_batch_first():
    torso = Torso(IMAGE, Net(encoder=SmallCnn(), frame_stack=4), Lstm(hidden=8))
    state = torso.initial_state(5)
    assert [s.shape[0] for s in state] == [5, 5, 5]
    _, after = torso(timestep(IMAGE, 3, 5), state)
    assert [(s.shape, s.dtype) for s in after] == [(s.shape, s.dtype) for s in state]


# choices and errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((4,), Mlp), ((1, 10, 5), SmallCnn), ((3, 35, 84), SmallCnn), ((1, 36, 36), Shallow), ((1, 84, 84), Shallow)],
)
def test_auto_chooses_the_encoder_by_the_observation(shape, expected):
    assert type(choose_encoder(Auto(), Spec("some", shape, torch.uint8, 2))) is expected


@pytest.mark.parametrize("encoder", [Auto(), Resnet(hidden_size=4), Mlp(hidden_size=4)], ids=str)
@pytest.mark.parametrize("size", [(2, 2), (2, 5), (3, 3), (10, 5), (36, 36)], ids=str)
def test_images_of_any_size_can_be_encoded(encoder, size):
    # the smallest board of Catch is 2x2
    spec = Spec("tiny", (1, *size), torch.uint8, 3)
    built = Encoder(encoder, spec, 1)
    assert built(torch.zeros(2, 1, *size, dtype=torch.uint8)).shape == (2, built.width)


def test_a_small_cnn_refuses_images_smaller_than_its_kernels():
    with pytest.raises(ValueError, match="tiny"):
        Encoder(SmallCnn(), Spec("tiny", (1, 2, 2), torch.uint8, 3), 1)


@pytest.mark.parametrize("encoder", [Shallow(), Resnet(), SmallCnn()], ids=lambda e: type(e).__name__)
def test_an_image_encoder_refuses_vectors(encoder):
    with pytest.raises(ValueError, match=r"needs images, but vector has vector observations: use net\.encoder:mlp"):
        Torso(VECTOR, Net(encoder=encoder), Ff())


def test_the_shallow_encoder_refuses_small_images():
    with pytest.raises(ValueError, match="shallow needs at least 36 pixels a side, image has 7: use mlp"):
        Torso(IMAGE, Net(encoder=Shallow()), Ff())


def test_frames_of_a_vector_cannot_be_stacked():
    with pytest.raises(ValueError, match=r"net\.frame-stack=4 needs images, but vector has vector observations: use 1"):
        Torso(VECTOR, Net(frame_stack=4), Ff())


@pytest.mark.parametrize("size", [0, -1])
def test_a_stack_of_no_frames_is_refused(size):
    with pytest.raises(ValueError, match=f"net.frame-stack={size} must be at least 1"):
        Net(frame_stack=size)


@pytest.mark.parametrize(
    "encoder", [Shallow(hidden_size=0), Resnet(num_layers=-1), Mlp(hidden_size=-3), Mlp(num_layers=-1)], ids=str
)
def test_an_encoder_of_no_size_is_refused(encoder):
    with pytest.raises(ValueError, match=r"net\.encoder needs hidden-size >= 1 and num-layers >= 0, not"):
        Net(encoder=encoder)


def test_an_input_that_is_not_fed_has_no_layer():
    """A layer without input would be a parameter that is never trained."""
    spec = Spec("any", (3,), torch.float32, 4)
    shown = Torso(spec, Net(action_units=5, reward_units=2, prev_action=False, prev_reward=False), Ff())
    plain = Torso(spec, Net(prev_action=False, prev_reward=False), Ff())
    assert [p.shape for p in shown.parameters()] == [p.shape for p in plain.parameters()]


def test_without_layers_a_vector_goes_into_the_core_unchanged():
    encoder = Encoder(Mlp(num_layers=0), VECTOR, 1)
    obs = torch.randn(3, *VECTOR.obs_shape)
    assert torch.equal(encoder(obs), obs) and encoder.width == obs.shape[1]
    assert not list(encoder.parameters())


@pytest.mark.parametrize("filters", [(16, 32), (16, 0, 32), (1, 2, 3, 4)])
def test_filters_are_three(filters):
    with pytest.raises(ValueError, match=r"net\.encoder\.filters=.* must be three numbers"):
        Net(encoder=Shallow(filters=filters))


def test_half_the_filters_are_a_smaller_network():
    spec = Spec("", (1, 84, 84), torch.uint8, 4)
    sizes = [count(Encoder(Shallow(256, filters=f), spec, 4)) for f in ((32, 64, 64), (16, 32, 32))]
    assert sizes[1] == 4 * 64 * 16 + 16 + 16 * 16 * 32 + 32 + 32 * 9 * 32 + 32 + 49 * 32 * 256 + 256 < sizes[0] / 2
