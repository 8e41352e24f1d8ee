"""Measuring a drafter: suites, metrics, the runner with its baselines, the search for a tree, and reports."""
