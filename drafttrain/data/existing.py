"""`drafttrain generate --backend existing`: conversations whose answers are taken as they stand.

Text from another model teaches the drafter another model's habits, so the target's own answers are worth more; this is
for data that is the target's already, or for a first domain adaptation.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from drafttrain.data.masks import conversation_records
from drafttrain.data.store import Store
from drafttrain.errors import UserError
from drafttrain.progress import Progress


def store_existing(args: argparse.Namespace, tokenizer: Any, store: Store, rank: int, owner: Any) -> dict[str, Any]:
    """Appends this process's conversations that the data set lacks; returns what this run did.

    Rows longer than --max-length are cut there; what is cut ends in "length", as a truncated answer does.

    Raises:
        UserError: a row that is no conversation, an empty mask, or an id that occurs twice.
    """
    done, seen = store.done_ids(), set()
    counts = {"conversations": 0, "response_tokens": 0}
    dropped = {"answer_beyond_max_length": 0}
    began = time.perf_counter()
    with Progress("conversations", None, "conversations") as progress:
        for record in conversation_records(tokenizer, Path(args.prompts).expanduser()):
            if record["id"] in seen:
                raise UserError(f"{args.prompts}: id={record['id']!r} occurs twice; ids must be unique")
            seen.add(record["id"])
            if record["id"] in done or owner(record["id"]) != rank:
                continue
            kept = cut(record, args.max_length)
            if kept is None:
                dropped["answer_beyond_max_length"] += 1
                continue
            store.append(kept)
            counts["conversations"] += 1
            counts["response_tokens"] += sum(end - start for start, end in kept["spans"])
            progress.advance()
            if 0 < args.max_tokens <= counts["response_tokens"]:
                break
    if not seen:
        raise UserError(f"prompts={args.prompts!r} is empty: it must hold one conversation a line")
    seconds = max(time.perf_counter() - began, 1e-9)
    rate = round(counts["response_tokens"] / seconds, 1)
    return {**counts, "seconds": round(seconds, 1), "tokens_per_second": rate, "dropped": dropped}


def cut(record: dict[str, Any], limit: int) -> dict[str, Any] | None:
    """The record's first `limit` tokens; None if no answer begins there."""
    if len(record["tokens"]) <= limit:
        return record
    spans = [[start, min(end, limit)] for start, end in record["spans"] if start < limit]
    if not spans:
        return None
    finish = list(record["finish"][: len(spans)])
    if spans[-1][1] < record["spans"][len(spans) - 1][1]:
        finish[-1] = "length"
    return {**record, "tokens": record["tokens"][: spans[-1][1]], "spans": spans, "finish": finish}
