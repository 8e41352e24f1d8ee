"""Training.

loop.py                 the loop: batches, steps, clipping, logs, measurements, checkpoints
step.py                 one step: target -> drafter -> loss -> metrics
order.py                the rows of each step
run.py                  the parts of a run: order, optimizer, logs, checkpoints
checkpoint.py           checkpoints: writing, finding the newest, resuming from it
arguments.py            a recipe's values as TrainingArguments
acceleration.py         processes, precision, DeepSpeed, optimizer and schedule
limits.py               time budgets, SIGTERM, Ctrl-C
held_out_decoding.py    decoding of held-out prompts, which chooses the best checkpoint
continued.py            training that goes on when new rows have come in
follower.py             a drafter that follows a policy in reinforcement learning: `follow`, `Follower`
on_policy.py            answers that the drafter samples during training
dry_step.py             a step on tensors without numbers, for `drafttrain plan`

The command is drafttrain/train.py; the target's states come from drafttrain/states/.
"""

from drafttrain.training.follower import Followed, Follower, follow

__all__ = ["Followed", "Follower", "follow"]
