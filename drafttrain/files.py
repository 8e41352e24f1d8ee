"""Where things are kept, and how results are written."""

from __future__ import annotations

import errno
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError


def cache_folder() -> Path:
    """What drafttrain can get or make again (models, built kernels): $DRAFTTRAIN_CACHE, else the user's cache folder."""
    own = os.environ.get("DRAFTTRAIN_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "drafttrain"


def suites_folder() -> Path:
    """The evaluation suites that come with drafttrain: in the repository, or where a wheel installs them."""
    repository = Path(__file__).resolve().parents[1] / "eval" / "suites"
    return repository if repository.is_dir() else Path(sysconfig.get_path("data")) / "share" / "drafttrain" / "suites"


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says so; safetensors and torch have errors of their own, with the cause in the text only."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(sign in str(error) for sign in ("No space left", "Disk quota exceeded", "PytorchStreamWriter"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces a JSON file in one step, so that readers see the old or the new one.

    Raises:
        UserError: the place cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"output={str(path)!r} cannot be written ({error.strerror}); choose another place") from error
