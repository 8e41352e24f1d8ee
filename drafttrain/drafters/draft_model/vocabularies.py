"""Draft models with a vocabulary of their own: shared tokens, and text from ids to other ids.

The draft model reads the committed text as its own tokenizer writes it; what it drafts reaches the
target in one of two ways:

    tokens    it drafts among the tokens that both vocabularies have, by their bytes: its distribution renormalized there is
              the proposal (token-level intersection, TLI). Trees of any shape, also drawn ones.
    text      it drafts freely, and the target's tokenizer writes the drafted text again behind the committed one
              (string-level exact match, SLEM). The target verifies these tokens as guesses that a
              rule chose.

    committed bytes    ... u n b e l          draft:   [un][bel]          tokens: [ie] is a token of both, so it is drafted
                                              target:  [unbel]            text:   [iev][able] -> "ievable" -> [ievable]

Either way the target verifies its own ids, so decoding stays lossless whatever is drafted.

Source: Timor et al. 2025, arXiv 2502.05202.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.convert_slow_tokenizer import bytes_to_unicode

from drafttrain.batch import Batch, TokenTree
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.files import Json

# Text on which overlap is measured: prose, code, numbers, several scripts.
_SAMPLE = """The committee's 1998 report, published in Geneva, didn't mention unemployment; its 12,450 readers noticed that.
def area(radius: float) -> float:\n    return 3.14159 * radius ** 2  # square metres\n
| name | value |\n| --- | --- |\n- "Where are you going?" she asked. I'll explain photosynthesis step by step:
first, light is absorbed by chlorophyll. Die Straße war naß. ¿Dónde está el niño? Привет, как дела? 你好,世界 🙂🚀
"""
# From this share of the sample's tokens on, `auto` drafts tokens: a chain is wrong from the first
# token that is not shared.
_ALIKE = 0.98
_REREAD = 24  # last tokens that are written again, as new text may change them
_BEHIND = 8  # of these, the first ones, which are only context
_AGREE = 4  # tokens behind the context that must stay as they were
_SURROGATES = re.compile("([\udc80-\udcff]+)")


class TokenBytes:
    """A tokenizer's tokens as the bytes that they stand for.

    Args:
        tokenizer: one of the tokenizers library, byte-level or with SentencePiece's marks. rows: of
            the model's vocabulary.
        name: of the model, for messages.

    Attributes:
        pieces: [rows] bytes of each id; empty for ids without a token. A special token's are its
            name.
        ids: (special or not, bytes) -> id. Of several tokens with the same bytes, the one that is
            not a byte token.
        end: EOS, None without one. prefix: ids before every text (BOS). spaced: a text's first
            token begins with a space that the text lacks.

    Raises:
        UserError: a tokenizer whose tokens cannot be read as bytes.
    """

    def __init__(self, tokenizer: Any, rows: int, name: str):
        self.tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        form: Json = {"type": type(tokenizer).__name__}
        if decoder is not None:
            form = json.loads(decoder.__getstate__())
        steps = {form["type"]}
        for step in form.get("decoders", ()):
            steps.add(step["type"])
        by_bytes = "ByteLevel" in steps
        if not by_bytes and not steps & {"ByteFallback", "Metaspace"}:
            raise UserError(
                f"drafting across vocabularies reads tokens as bytes, but the tokenizer of {name!r} decodes by "
                f"{', '.join(sorted(steps))}; use one that is byte-level or SentencePiece's"
            )
        added = tokenizer.added_tokens_decoder
        self.special = set(tokenizer.all_special_ids)
        self.special.update(i for i, token in added.items() if token.special)

        # The bytes of each token.
        fallback = set()  # byte tokens
        self.pieces = [b""] * rows
        for token, i in tokenizer.get_vocab().items():
            if i >= rows:
                continue
            # Added tokens are matched in a text before it is split, so they stand for themselves.
            literal = i in added and (by_bytes or added[i].special or not added[i].normalized)
            if literal or (by_bytes and not all(c in _BYTE_OF for c in token)):
                self.pieces[i] = token.encode()
            elif by_bytes:
                self.pieces[i] = bytes(_BYTE_OF[c] for c in token)
            elif "ByteFallback" in steps and re.fullmatch("<0x[0-9A-F]{2}>", token):
                self.pieces[i] = bytes([int(token[3:5], 16)])
                fallback.add(i)
            else:
                self.pieces[i] = token.replace("▁", " ").encode()
        self.ids: dict[tuple[bool, bytes], int] = {}
        # Byte tokens come last: of equal bytes, the other token is taken.
        for i in sorted(range(rows), key=lambda i: (i in fallback, i)):
            if self.pieces[i]:
                self.ids.setdefault((i in self.special, self.pieces[i]), i)
        self.end: int | None = None
        end = tokenizer.eos_token_id
        if isinstance(end, int) and end < rows and self.pieces[end]:
            self.end = end

        # What the tokenizer writes before every text.
        plain = self._written("a")
        full = tokenizer("a")["input_ids"]
        self.prefix: list[int] = []
        for i in range(len(full)):
            if full[i : i + len(plain)] == plain:
                self.prefix = full[:i]
                break
        self.spaced = self.text(plain) == b" a"

    def text(self, ids: Sequence[int]) -> bytes:
        """The bytes that ids stand for."""
        return b"".join([self.pieces[i] for i in ids])

    def write(self, data: bytes) -> list[int]:
        """The ids of a text, without BOS.

        Bytes that are no UTF-8 become byte tokens, as far as there are any.
        """
        ids: list[int] = []
        # Bytes that are no UTF-8 become surrogates, one each.
        for part in _SURROGATES.split(data.decode(errors="surrogateescape")):
            if _SURROGATES.match(part):
                for byte in part.encode(errors="surrogateescape"):
                    found = self.ids.get((False, bytes([byte])))
                    if found is not None:
                        ids.append(found)
            elif part:
                ids += self._written(part)
        return ids

    def write_behind(self, before: bytes, data: bytes) -> list[int]:
        """The ids of `data` where it follows `before`; none if no tokens make up exactly its bytes.

        If a token would span the border, the text behind it is written as after a line break or a
        dot.
        """
        for context in (before, b"\n", b"."):
            ids = self.write(context + data)
            left = len(data)
            begin = len(ids)
            while left > 0 and begin > 0:
                begin -= 1
                left -= len(self.pieces[ids[begin]])
            if not left and self.text(ids[begin:]) == data:
                return ids[begin:]
        return []

    def _written(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


# Of byte-level vocabularies.
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


class VocabularyPair:
    """A target's vocabulary and a draft model's.

    Args:
        wanted: `tokens`, `text`, or `auto`: by tokens if nearly all of a sample's are shared, else
            by text; trees that draw their tokens by tokens.

    Attributes:
        kept_ids: [d] target ids of the shared tokens, ascending: those of the same bytes, and EOS
            whatever its name.
        own_ids: [d] the draft model's ids of the same tokens.
        of_text: share of the target's tokens of a sample text that both have. way: how it drafts,
            in words. recorded: both, and the shared tokens by the target's, for results.

    Raises:
        UserError: `tokens` without a shared token.
    """

    def __init__(
        self,
        target: TokenBytes,
        own: TokenBytes,
        wanted: str,
        device: torch.device,
    ):
        self.target = target
        self.own = own
        # The draft model's id of each shared token, by the target's.
        both = {i: own.ids[key] for key, i in target.ids.items() if key in own.ids}
        theirs = target.end
        mine = own.end
        if both and theirs is not None and mine is not None:
            known = theirs in both or mine in both.values()
            if not known:
                both[theirs] = mine
        # Bytes of the target's special tokens, by the draft model's ids.
        self._special = {both[i]: target.pieces[i] for i in target.special & both.keys()}
        pairs = torch.tensor(sorted(both.items()), dtype=torch.long, device=device)
        self.kept_ids, self.own_ids = pairs.view(-1, 2).T.contiguous()

        sample = target.write(_SAMPLE.encode())
        self.of_text = sum(i in both for i in sample) / max(1, len(sample))
        self.way = "text, drawn trees by tokens"
        if wanted in ("tokens", "text"):
            self.way = wanted
        elif self.of_text >= _ALIKE:
            self.way = "tokens"
        self.recorded: Json = {
            "drafts_by": self.way,
            "shared_of_target": round(len(both) / max(1, len(target.ids)), 4),
            "shared_of_text": round(self.of_text, 4),
        }
        if self.way == "tokens" and not both:
            raise UserError(
                "drafter.vocabulary_match=tokens, but the two vocabularies share no token; use text, or leave it out"
            )

    def by_text(self, spec: TreeSpec) -> bool:
        """Whether a tree is drafted in the draft model's own tokens.

        `@sample` draws from shared ones unless `text` is set.
        """
        if self.way in ("tokens", "text"):
            return self.way == "text"
        return not spec.sampled or len(self.kept_ids) == 0

    def drafted_text(self, i: int) -> bytes:
        """Bytes of the target's text that a drafted id stands for.

        Empty for a special token that the target lacks.
        """
        if i in self.own.special:
            return self._special.get(i, b"")
        return self.own.pieces[i]

    def align(self, batch: Batch, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A batch of target tokens in the draft model's tokens, a row per conversation.

        Args:
            at: [t] flat positions of target tokens.

        Returns:
            ids [c, s'], padded with 0; [t] bool, True where a token of the draft model ends in the
            text where the target's does; [u] flat positions in `ids` of those.
        """
        device = batch.input_ids.device
        width = batch.input_ids.shape[1]
        rows: list[Tensor] = []
        columns = {}  # the target's flat position -> (row, column) in ids
        for row, start, length in batch.conversations().tolist():
            tokens = batch.input_ids[row, start : start + length].tolist()
            text = CommittedText(self)
            text.extend(tokens)
            ends = {}  # bytes behind a token of the draft model -> the token's column
            if self.own.text(text.ids).endswith(text.data):  # a tokenizer may normalize text
                for j, left in enumerate(_bytes_behind(self.own, text.ids)):
                    ends[left] = j
            for i, left in enumerate(_bytes_behind(self.target, tokens)):
                if left in ends:
                    columns[row * width + start + i] = (len(rows), ends[left])
            rows.append(torch.tensor(text.ids, dtype=torch.long))
        ids = pad_sequence(rows, batch_first=True)
        found = []
        flat = []
        for position in at.tolist():
            place = columns.get(position)
            found.append(place is not None)
            if place is not None:
                row, j = place
                flat.append(row * ids.shape[1] + j)
        return (
            ids.to(device),
            torch.tensor(found, dtype=torch.bool, device=device),
            torch.tensor(flat, dtype=torch.long, device=device),
        )


def _bytes_behind(side: TokenBytes, ids: list[int]) -> list[int]:
    """Number of bytes of text behind each token."""
    behind = []
    left = sum(len(side.pieces[i]) for i in ids)
    for i in ids:
        left -= len(side.pieces[i])
        behind.append(left)
    return behind


class CommittedText:
    """A sequence's committed text, and its tokens in the draft model's vocabulary.

    Attributes:
        data: the text. ids: as the draft model's tokenizer writes it, BOS included.
    """

    def __init__(self, pair: VocabularyPair):
        self.pair = pair
        self.data = bytearray()
        self.ids: list[int] = []
        self._recent: list[int] = []  # the target's last ids

    def extend(self, tokens: list[int]) -> int:
        """Adds committed target ids.

        Returns:
            How many of the ids so far stay as they are; fewer than the new number of ids unless all
            do.
        """
        target = self.pair.target
        held = len(self.ids)
        new = target.text(tokens)
        if not self._recent:  # the draft model has a BOS of its own
            begin = 0
            if tokens[: len(target.prefix)] == target.prefix:
                begin = len(target.prefix)
            new = target.text(tokens[begin:])
            if target.spaced:
                new = new.removeprefix(b" ")
        self._recent = (self._recent + tokens)[-_BEHIND:]
        self.data += new
        begin, ids = self._written(new)
        same = 0  # ids from `begin` on that stay
        for old, now in zip(self.ids[begin:], ids, strict=False):
            if old != now:
                break
            same += 1
        # Fewer ids than before: the last one is read again.
        if same == len(ids) and begin + same < held:
            same -= 1
        self.ids[begin + same :] = ids[same:]
        return begin + same

    def _written(self, new: bytes) -> tuple[int, list[int]]:
        """(i, ids from i on) of the text that ends with `new`.

        New text can only change the tokens right before it.
        """
        own = self.pair.own
        begin = len(self.ids) - _REREAD
        if begin > len(own.prefix):
            before = own.text(self.ids[begin : begin + _BEHIND])
            held = self.ids[begin + _BEHIND :]
            last = own.text(held) + new
            if self.data.endswith(before + last):
                ids = own.write_behind(before, last)
                if ids[:_AGREE] == held[:_AGREE]:
                    return begin + _BEHIND, ids
        return 0, [*own.prefix, *own.write(bytes(self.data))]

    def rewrite(self, tree: TokenTree, spec: TreeSpec) -> TokenTree:
        """A tree of the draft model's ids, as the target's tokenizer writes its paths.

        Equal beginnings share their nodes.
        A token of the target has the probability of the drafted path that completes its bytes.
        Paths end at a special token that the target lacks.
        """
        target = self.pair.target
        before = target.text(self._recent)
        drafted = tree.tokens.tolist()
        probs: list[float] = []
        if tree.log_probs is not None:
            probs = tree.log_probs.tolist()
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        place: dict[tuple[int, int], int] = {}  # node of each (parent, token)
        for leaf in sorted(set(range(len(tree))) - set(tree.parents)):
            path = []
            node = leaf
            while node >= 0:
                path.append(node)
                node = tree.parents[node]
            path.reverse()

            # The path's text, and where each of its tokens ends there.
            text = b""
            ends = []
            for node in path:
                piece = self.pair.drafted_text(drafted[node])
                if not piece:
                    break
                text += piece
                ends.append(len(text))

            # The same text in the target's tokens.
            above = -1
            end = 0
            for token in target.write_behind(before, text)[: spec.depth]:
                end += len(target.pieces[token])
                score = probs[path[bisect_left(ends, end)]]  # the node that completes the token
                node = place.setdefault((above, token), len(tokens))
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(above)
                    scores.append(score)
                scores[node] = max(scores[node], score)
                above = node
        return TokenTree.likeliest(
            spec.budget,
            tokens,
            parents,
            scores,
            tree.tokens.device,
        )
