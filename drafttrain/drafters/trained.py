"""A trained drafter's folder as export, verify and push see it: which kind, made for which target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.drafters.registry import META_FILE, drafter_folder, kind_class, kind_of, kinds, load_trained
from drafttrain.errors import UserError
from drafttrain.formats.weights import read_config
from drafttrain.target.shell import architectures_of as architectures_of
from drafttrain.target.shell import load_shell as load_shell
from drafttrain.target.target import resolve_dtype as parse_dtype  # noqa: F401


@dataclass(frozen=True)
class Trained:
    """A drafter on disk.

    Attributes:
        folder: where it is. kind: its kind's name. config: its config.json.
        target: the identity of its target as recorded; empty if nothing is.
    """

    folder: Path
    kind: str
    config: dict[str, Any]
    target: dict[str, Any]

    @property
    def target_name(self) -> str:
        return self.target.get("name", "")

    def load(self) -> Any:
        """The drafter, on the CPU and not bound to a target.

        Raises:
            UserError: its weights do not fit its config.
        """
        try:
            return load_trained(str(self.folder))
        except (OSError, ValueError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(
                f"drafter={str(self.folder)!r} cannot be loaded ({first}); train or import it anew"
            ) from error


def find_drafter(name: str) -> Trained:
    """Looks at a drafter by folder or Hub id.

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
