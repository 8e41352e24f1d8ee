"""Learning one batch, for no more steps than it takes."""

from __future__ import annotations

import torch


def overfit(drafter, inputs, learned, lr, most):
    """Trains on the same inputs until `learned(step)` holds, at most `most` steps; gives the last step, learned or not."""
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=lr)
    for _ in range(most):
        step = drafter(inputs)
        if learned(step):
            break
        optimizer.zero_grad()
        step.loss.backward()
        optimizer.step()
    return step
