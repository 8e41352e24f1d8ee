"""Answers that the file of prompts has already, as a backend of `generate`: nothing is asked.

Another model's answers teach the drafter that model's habits, so the target's own answers work
better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from drafttrain.data.backends import Backend
from drafttrain.data.conversation import ChatRenderer, Conversation
from drafttrain.data.failures import BadReply
from drafttrain.data.image_prompts import too_long
from drafttrain.data.masks import recorded_conversations
from drafttrain.data.store import Share
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.images import BadPicture

UNUSABLE = "unusable row"  # the reason of answers that cannot be learned from
UNUSABLE_FIX = "mend those rows, or clean the file with: drafttrain prompts --source file"


@dataclass
class ExistingBackend(Backend):
    """The conversations of a file with the answers in it.

    Rows longer than max_length are cut; a cut answer ends in "length", as a truncated one does.
    Prompts are not cut, so images stay whole. A row that is not a conversation, has no answer or an
    image that cannot be used ends with a `BadReply`.

    Args:
        renderer: of the target's conversations. path: the file. kwargs: chat_template_kwargs for rows that do not set them.
        done: ids of stored rows, which are passed over. share: the rows of this process.
    """

    renderer: ChatRenderer
    path: Path
    kwargs: Json
    max_length: int
    done: set[str]
    share: Share
    asks = False
    drops = ("answer_beyond_max_length",)

    def run(
        self,
        conversations: Iterable[Conversation],
        stop: Callable[[], bool],
    ) -> Iterator[tuple[Conversation, BadReply | None]]:
        """Yields the rows of the file; `conversations` are none.

        Raises UserError: an id that occurs twice, or no row that can be used.
        """
        seen = set[str]()
        unusable = 0
        last: BadReply | None = None
        for key, records in recorded_conversations(
            self.renderer.tokenizer,
            self.path,
            self.kwargs,
            self.renderer.target.eos_ids,
            self.max_length,
            self.renderer,
        ):
            if isinstance(records, UserError):
                unusable += 1
                last = BadReply(UNUSABLE, str(records))
                if isinstance(records, BadPicture):
                    last = BadReply(records.reason, records.detail)
                if self.share.owns(key):
                    yield Conversation(key, ""), last
                continue
            # Rows of a conversation are stored one by one: earlier runs may have stored some.
            for record in records:
                row = record["id"]
                if row in seen:
                    raise UserError(f"{self.path}: id={row!r} occurs twice; ids must be unique")
                seen.add(row)
                if row in self.done or not self.share.owns(row):
                    continue
                if stop():
                    return
                kept = cut(record, self.max_length)
                if kept is not None:
                    self._new_tokens += sum(end - start for start, end in kept["spans"])
                    pictures = kept.pop("pictures", ())
                    spans = kept["spans"]
                    yield Conversation(row, "", spans=spans, recorded=kept, images=pictures), None
                elif record.get("images"):
                    first = record["spans"][0][0]
                    images = len(record["images"])
                    yield Conversation(row, ""), too_long(first, images, self.max_length)
                elif "part" not in record:  # a conversation's other rows have a part
                    yield Conversation(row, "", ended="answer_beyond_max_length"), None
        if not seen and last is not None:
            raise UserError(
                f"no row can be used ({last.reason} {unusable}; the last: {last.detail}); {UNUSABLE_FIX}"
            )
        if not seen:
            raise UserError(
                f"prompts={str(self.path)!r} is empty: it must hold one conversation a line"
            )


def cut(record: Json, limit: int) -> Json | None:
    """The record's first `limit` tokens; None if no answer begins there."""
    if len(record["tokens"]) <= limit:
        return record
    spans = [[start, min(end, limit)] for start, end in record["spans"] if start < limit]
    if not spans:
        return None
    count = len(spans)
    last = spans[-1][1]
    finish = list(record["finish"][:count])
    if last < record["spans"][count - 1][1]:
        finish[-1] = "length"

    # Tokens behind the last answer teach nothing.
    kept = {**record, "tokens": record["tokens"][:last], "spans": spans, "finish": finish}
    if "reasoning" in record:
        kept["reasoning"] = []
        for n, (start, end) in zip(record["reasoning"], spans, strict=False):
            kept["reasoning"].append(min(n, end - start))
    return kept
