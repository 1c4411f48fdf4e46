"""Training budgets of the memory presets; a file of its own, so that listing presets imports nothing heavy."""

# task -> length -> training episodes (Ni et al. 2023)
# fmt: off
MEMORY_RL = {
    "tmaze-passive": {
        50: 20_000, 100: 20_000, 250: 16_000, 500: 8_000, 750: 8_000, 1000: 8_000, 1250: 8_000, 1500: 6_700,
    },
    "tmaze-active": {20: 40_000, 50: 40_000, 100: 40_000, 250: 32_000, 500: 16_000},
    "visual-match": {60: 40_000, 120: 30_000, 250: 15_000, 500: 10_000, 750: 10_000, 1000: 10_000},
    "key-to-door": {60: 40_000, 120: 40_000, 250: 30_000, 500: 15_000},
}
# fmt: on

# small cores with larger learning rates, for a laptop: task -> length -> training episodes
QUICK = {
    "tmaze-passive": {1500: 4_000, 10_000: 2_500},
    "tmaze-active": {250: 4_000},
    "visual-match": {60: 10_000, 250: 10_000},
    "key-to-door": {60: 6_000, 120: 12_000},
}
