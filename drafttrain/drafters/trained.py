"""A trained drafter's folder, read once: its kind, its config and the identity of its target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.registry import META_FILE, drafter_folder, kind_class, kind_of, kinds, load_trained
from drafttrain.errors import UserError, first_line
from drafttrain.files import Json
from drafttrain.formats.weights import read_config


@dataclass(frozen=True)
class Trained:
    """A drafter on disk.

    Attributes:
        folder: where it is. kind: its kind's name. config: its config.json.
        target: the recorded identity of its target; empty if none is recorded.
    """

    folder: Path
    kind: str
    config: Json
    target: Json

    @property
    def target_name(self) -> str:
        return self.target.get("name", "")

    def load(self) -> TrainableDrafter:
        """Loads the drafter on the CPU, not bound to a target.

        Raises:
            UserError: its weights do not fit its config.
        """
        try:
            return load_trained(str(self.folder))
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"drafter={str(self.folder)!r} cannot be loaded ({first_line(error)}); train it again"
            ) from error


def find_drafter(name: str) -> Trained:
    """Reads the config of a drafter, given by folder or Hub id.

    Raises:
        UserError: nothing there, not a drafter of ours, or a kind without weights.
    """
    kind = kind_of(name)
    if kind not in kinds() or not kind_class(kind).trainable:
        raise UserError(f"drafter={name!r} has no weights to ship; give a trained drafter's folder or Hub id")
    folder = drafter_folder(name)
    config = read_config(folder)
    meta = read_config(folder, META_FILE) if (folder / META_FILE).is_file() else config
    return Trained(folder, kind, config, meta.get("target") or {})
