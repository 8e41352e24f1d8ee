"""A drafter that is replaced while a server runs."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.kinds import split_name
from drafttrain.drafters.registry import load_drafter
from drafttrain.errors import UserError
from drafttrain.target import Target

logger = logging.getLogger(__name__)


class LatestDrafter:
    """The drafter that a name leads to now, such as `OUTPUT/current+ngram` of `drafttrain adapt`.

    Answers that are being decoded keep the drafter with which they began. Several threads may share
    it.

    Args:
        name: as for `load_drafter`; its folder may be a link, which is followed at every `get`.

    Attributes:
        version: the folder of the drafter in use.
    """

    def __init__(self, name: str, target: Target):
        self.name = name
        self.target = target
        self._place = Path(split_name(name)[0]).expanduser()
        self._loading = threading.Lock()
        self.version = self._place.resolve()
        self._drafter = self._load()

    def _load(self) -> Drafter | None:
        # The name, with the folder that its link leads to now.
        name = self.name.replace(split_name(self.name)[0], str(self.version), 1)
        return load_drafter(name, self.target)

    def get(self) -> Drafter | None:
        """The newest version, loaded by the first call that sees it.

        If it does not load, a warning is logged and the old one stays.
        """
        found = self._place.resolve()
        if found != self.version and self._loading.acquire(blocking=False):
            before = self.version
            self.version = found
            try:
                self._drafter = self._load()
            except UserError as error:
                logger.warning("%s does not load, %s stays: %s", found, before.name, error)
            finally:
                self._loading.release()
        return self._drafter
