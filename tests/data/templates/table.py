"""Stores the conversations of every family on every path, and compares the rows with what was served.

python -m tests.data.templates.table
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from drafttrain.data.backends import Backend, LocalBackend, ResponseSettings
from drafttrain.data.conversation import ChatRenderer, Conversation
from drafttrain.data.failures import BadReply
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.ops.sampling import SamplingParams
from drafttrain.target import Target
from tests.data.records import records_of
from tests.data.templates.conversations import CASES, Case
from tests.data.templates.families import FAMILIES, Family
from tests.data.templates.scripted import Script, ScriptedEngine, ScriptedServers, Served

PATHS = ("engine", "ids", "text", "existing")


@dataclass
class Cell:
    """A conversation on one path.

    Attributes:
        turns: answers in the conversation. stored: those in the data set. rows: its rows.
        tokens, generated: of the rows, and of their spans. wrong: spans that are not what was served, or whose reasoning is not.
        refused: why nothing, or not everything, was stored.
    """

    turns: int
    stored: int = 0
    rows: int = 0
    tokens: int = 0
    generated: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: str = ""

    def add(self, record: Json, served: Callable[[list[int]], Served | None]) -> None:
        """Counts a stored row. served: what was generated after each prompt that was read."""
        self.rows += 1
        self.stored += len(record["spans"])
        self.tokens += len(record["tokens"])
        for number, (start, end) in enumerate(record["spans"]):
            self.generated += end - start
            found = served(record["tokens"][:start])
            if found is None or found.ids != record["tokens"][start:end]:
                self.wrong.append(f"{record['id']} [{start}, {end})")
            elif found.reasoning is not None and found.reasoning != record["reasoning"][number]:
                self.wrong.append(f"reasoning of {record['id']} [{start}, {end})")


def target_of(family: Family) -> Target:
    """A tiny target whose tokens are the family's; it never runs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config = LlamaConfig(
        **sizes,
        vocab_size=len(family.tokenizer),
        max_position_embeddings=4096,
        eos_token_id=family.end_ids,
    )
    return Target.wrap(
        LlamaForCausalLM(config), family.tokenizer, name=family.name, dtype=torch.float32
    )


def row_of(family: Family, case: Case) -> Json:
    """The conversation as a line of a file in OpenAI's form."""
    messages = []
    for message, _ in family.turns(case):
        kept = {key: value for key, value in message.items() if value or key == "content"}
        for call in kept.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(
                call["function"]["arguments"], ensure_ascii=False
            )
        messages.append(kept)
    row: Json = {"id": case.name, "messages": messages, "chat_template_kwargs": family.kwargs(case)}
    return row | ({"tools": case.tools} if case.tools and family.tools_key == "tools" else {})


def answered(case: Case) -> int:
    return sum(message["role"] == "assistant" for message in case.messages)


def stored(family: Family, case: Case, path: str) -> Cell:
    """Stores a conversation on one of PATHS."""
    cell = Cell(answered(case))
    try:
        if path == "existing":
            _existing(family, case, cell)
        else:
            _generated(family, case, path, cell)
    except UserError as error:
        cell.refused = str(error)
    return cell


def _existing(family: Family, case: Case, cell: Cell) -> None:
    script = Script(family, case, cut=family.thinks(case) and not family.raw)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write(json.dumps(row_of(family, case)) + "\n")
        file.flush()
        for record in records_of(family.tokenizer, Path(file.name), family.end_ids):
            cell.add(record, script.by_text)


@cache
def backends_of(family: Family) -> tuple[LocalBackend, ScriptedServers]:
    """The backends that run every conversation of a family."""
    settings = ResponseSettings(ChatRenderer(target_of(family)), SamplingParams(), 300, 4000, 0)
    with contextlib.redirect_stdout(io.StringIO()):
        servers = ScriptedServers(settings, Script(family, CASES[0]))
    return LocalBackend(settings.renderer.target, settings, 1, ()), servers


def _generated(family: Family, case: Case, path: str, cell: Cell) -> None:
    script = Script(family, case, pieces=path != "text")
    local, servers = backends_of(family)
    local.engine = ScriptedEngine(script)  # type: ignore[assignment]
    servers.script, servers.by_ids = script, path == "ids"
    backend: Backend = local if path == "engine" else servers
    settings = servers.settings
    conversation = Conversation.from_row(row_of(family, case), "row")
    conversation.open(settings.renderer)
    for it, ended in backend.run([conversation], lambda: False):
        cell.refused = str(ended) if isinstance(ended, BadReply) else it.ended
        if not isinstance(ended, BadReply):
            cell.add(
                it.record(settings.renderer), script.by_text if path == "text" else script.by_ids
            )


def cells(family: Family) -> dict[str, dict[str, Cell]]:
    """A family's conversations by name, on every path."""
    return {case.name: {path: stored(family, case, path) for path in PATHS} for case in CASES}


HEADER = [
    "| family | " + " | ".join(case.name for case in CASES) + " |",
    "| --- |" + " --- |" * len(CASES),
]


def row(name: str, rows: dict[str, dict[str, Cell]]) -> str:
    """A family's line of the page's table: generated / stored tokens of the exchange of ids, and what the others lack."""
    shown = []
    for found in rows.values():
        ids = found["ids"]
        lacking = [path for path in ("text", "existing") if found[path].stored < found[path].turns]
        part = f", {ids.stored} of {ids.turns} answers" if ids.stored < ids.turns else ""
        without = f", not by {' or '.join(lacking)}" if lacking else ""
        shown.append(f"{ids.generated} / {ids.tokens}{part}{without}" if ids.stored else "refused")
    return f"| {name} | " + " | ".join(shown) + " |"


if __name__ == "__main__":
    chosen = {
        family.name: cells(family)
        for family in FAMILIES
        if len(sys.argv) < 2 or family.name in sys.argv
    }
    print(*HEADER, *(row(name, rows) for name, rows in chosen.items()), sep="\n")
