"""Trains as `drafttrain train` does, slowly, and notes the rows of each micro-batch once its loss is computed.

python -m tests.training.noted_training NOTES SECONDS RECIPE [key=value ...]

NOTES gets a line {"process", "step", "rows"} per micro-batch, each by one write; SECONDS are added to each micro-batch.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from drafttrain.cli import main
from drafttrain.files import append_line
from drafttrain.states import served
from drafttrain.training.step import TrainingStep


def train(notes: Path, seconds: float, words: list[str]) -> int:
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    plain = TrainingStep.compute_loss
    served._FIRST_PAUSE, served._LONGEST_PAUSE = 0.02, 0.2

    def noted(self, model, inputs, *args, **kwargs):
        loss = plain(self, model, inputs, *args, **kwargs)
        if model.training:
            line = {
                "process": os.getpid(),
                "step": self.state.global_step,
                "rows": inputs["index"].tolist(),
            }
            append_line(file, line)
            time.sleep(seconds)
        return loss

    TrainingStep.compute_loss = noted
    return main(["train", *words])


if __name__ == "__main__":
    sys.exit(train(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
