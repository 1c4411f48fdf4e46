"""Seeds are derived from addresses, and different addresses give independent random streams."""

import itertools

import numpy as np
import pytest

from bestiary.seeding import ACTIONS, EVAL, INSPECTION, TRAIN, WEIGHTS, derive, hash64, substream


def test_the_same_address_always_gives_the_same_seed():
    assert derive(3, TRAIN, 7, 11) == derive(3, TRAIN, 7, 11)


def test_a_seed_is_a_natural_number_that_fits_in_31_bits():
    seeds = [derive(a, b) for a in range(50) for b in range(50)]
    assert all(type(s) is int and 0 <= s < 2**31 for s in seeds)
    assert max(seeds) > 2**30


def test_streams_have_different_seeds():
    streams = (TRAIN, EVAL, ACTIONS, WEIGHTS)
    assert len(set(streams)) == 4
    seeds = [derive(seed, stream, slot) for seed in range(8) for stream in streams for slot in range(64)]
    assert len(set(seeds)) == len(seeds)


def test_substreams_of_different_kinds_differ():
    kinds = (TRAIN, EVAL, INSPECTION)
    found = {kind: {substream(kind, seed, number) for seed in range(20) for number in range(20)} for kind in kinds}
    assert all(len(streams) == 400 for streams in found.values())
    assert len(set.union(*found.values()) | set(range(64))) == 3 * 400 + 64


def test_the_order_of_an_address_matters():
    assert len({derive(*address) for address in itertools.permutations((1, 2, 3, 4))}) == 24


def test_a_longer_address_is_another_address():
    # slot 0 of a stream differs from the stream, and its episode 0 from the slot
    seeds = [derive(5, *[0] * zeros) for zeros in range(6)]
    assert len(set(seeds)) == len(seeds)


def test_a_large_seed_differs_from_two_small_ones():
    assert derive(2**32, TRAIN, 7) != derive(0, EVAL, 0, 7)


def test_neighbouring_addresses_have_uncorrelated_seeds():
    bits = np.array([[derive(seed, TRAIN, slot) for slot in range(256)] for seed in range(4)])
    flipped = [bin(int(a) ^ int(b)).count("1") for a, b in zip(bits[:, :-1].flat, bits[:, 1:].flat, strict=True)]
    assert np.mean(flipped) == pytest.approx(31 / 2, abs=0.5)


def test_hash64_is_splitmix64():
    # the published sequence of SplitMix64 for the seed 1234567
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert hash64(np.full(4, 1234567), np.arange(4)).tolist() == expected


def test_hash64_of_an_array_equals_hash64_of_its_elements():
    keys, counters = np.arange(20) * 977, np.arange(20) % 7
    whole = hash64(keys, counters, 3)
    assert whole.dtype == np.uint64
    assert whole.shape == (20,)
    for i in range(20):
        assert hash64(keys[i : i + 1], int(counters[i]), 3)[0] == whole[i]


def test_hash64_does_not_change_its_key_or_warn(recwarn):
    key = np.array([2**64 - 1, 0], np.uint64)
    hash64(key, 2**63, 5)
    assert key.tolist() == [2**64 - 1, 0]
    assert not recwarn.list


def test_hash64_depends_on_counters_and_their_order():
    key = np.array([9], np.uint64)
    grid = {int(hash64(key, a, b)[0]) for a in range(64) for b in range(64)}
    assert len(grid) == 64 * 64
    assert hash64(key, 1)[0] != hash64(key, 1, 0)[0]


def test_hash64_sets_every_bit_half_of_the_time():
    n = 20_000
    words = hash64(np.zeros(n, np.uint64), np.arange(n), 1)
    share = [(words >> np.uint64(i) & np.uint64(1)).mean() for i in range(64)]
    assert np.abs(np.array(share) - 0.5).max() < 5 * 0.5 / np.sqrt(n)


def test_hash64_modulo_a_small_number_is_uniform():
    n, k = 30_000, 5
    counts = np.bincount((hash64(np.arange(n), 4, 2) % np.uint64(k)).astype(int), minlength=k)
    chi_square = ((counts - n / k) ** 2 / (n / k)).sum()
    assert chi_square < 23.5  # one in ten thousand for four degrees of freedom
