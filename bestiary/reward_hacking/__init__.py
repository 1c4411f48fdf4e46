"""Reward hacking: the study over proxies and sizes, its report, and detectors."""
