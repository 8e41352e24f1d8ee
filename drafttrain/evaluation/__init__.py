"""Measuring a drafter: suites, metrics, the runner with its baselines, and the diagnosis."""
