"""The training loop: a transformers Trainer whose loss is the drafter's training-time test."""
