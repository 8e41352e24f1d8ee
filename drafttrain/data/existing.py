"""`drafttrain generate --backend existing`: stores conversations with the answers that they hold.

Another model's answers teach the drafter that model's habits, so the target's own answers work better. Use this for
conversations that the target itself wrote, or for a first domain adaptation.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from drafttrain.data.masks import conversation_records
from drafttrain.data.store import Share, Store
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.progress import Progress


def store_existing(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, store: Store, share: Share) -> Json:
    """Appends this process's conversations that the data set lacks; returns the counts of this run.

    Rows longer than --max-length are cut; a cut answer ends in "length", as a truncated one does.

    Raises:
        UserError: a row that is no conversation, an empty mask, or an id that occurs twice.
    """
    done, seen = store.done_ids(), set()
    conversations = tokens = beyond = 0
    began = time.perf_counter()
    with Progress("conversations", None, "conversations") as progress:
        for record in conversation_records(tokenizer, Path(args.prompts).expanduser()):
            if record["id"] in seen:
                raise UserError(f"{args.prompts}: id={record['id']!r} occurs twice; ids must be unique")
            seen.add(record["id"])
            if record["id"] in done or not share.owns(record["id"]):
                continue
            kept = cut(record, args.max_length)
            if kept is None:
                beyond += 1
                continue
            store.append(kept)
            conversations += 1
            tokens += sum(end - start for start, end in kept["spans"])
            progress.advance()
            if 0 < args.max_tokens <= tokens:
                break
    if not seen:
        raise UserError(f"prompts={args.prompts!r} is empty: it must hold one conversation a line")
    return run_counts(conversations, tokens, time.perf_counter() - began, {"answer_beyond_max_length": beyond})


def run_counts(conversations: int, tokens: int, seconds: float, dropped: dict[str, int]) -> Json:
    """The part of summary.json about one run."""
    rate = round(tokens / max(seconds, 1e-9), 1)
    counts = {"conversations": conversations, "response_tokens": tokens}
    return {**counts, "seconds": round(seconds, 1), "tokens_per_second": rate, "dropped": dropped}


def cut(record: Json, limit: int) -> Json | None:
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
