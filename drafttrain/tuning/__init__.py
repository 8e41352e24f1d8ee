"""Choosing trees and settings, and predicting what a run takes.

tune.py, replay.py                        the fastest tree: predicted by replay, then measured
sweep.py                                  eval over temperatures, trees, batch sizes and dtypes
plan.py, plan_recipe.py, plan_memory.py   memory, disk and hours of a recipe
estimate.py, costs.py, hardware.py        expected speed-up on other hardware; the roofline
"""
