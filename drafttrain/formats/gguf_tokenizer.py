"""A Hugging Face tokenizer as keys of a GGUF file, for llama.cpp.

Types, merges and special tokens come from the gguf library. llama.cpp knows the rules by which text
is cut before merging by name (`tokenizer.ggml.pre`, src/llama-vocab.cpp). A rule is recognized by
its regular expression, not guessed: under another rule llama.cpp would tokenize other text than the
target does.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from drafttrain.errors import UserError
from drafttrain.extras import LazyPackage
from drafttrain.files import Json, scratch_folder

if TYPE_CHECKING:
    import gguf
else:
    gguf = LazyPackage("gguf")

_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = (
    _SHORT + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|" + _SPACES
)
# Words of capitals, then small letters: OpenAI's o200k and Mistral's tekken.
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{short}|"
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{short}|"
    r"{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|" + _SPACES
)
_MARKED = r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
# Pre-tokenization rule, as tokenizer.json writes it -> llama.cpp's name for it.
RULES = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (_WORDS.format(digits=r"\p{N}"),): "qwen2",
    (_SHORT + _MARKED + _SPACES,): "qwen35",
    (_WORDS.format(digits=r"\p{N}{1,3}"),): "llama-bpe",
    (_CASED.format(digits=r"\p{N}", short=""),): "tekken",
    (_CASED.format(digits=r"\p{N}{1,3}", short=_SHORT + "?"),): "gpt-4o",
}


def add_tokenizer(
    writer: gguf.GGUFWriter,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
) -> None:
    """Writes a tokenizer's keys. vocab_size: tokens of the file; those beyond it are placeholders."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError("GGUF is written from a fast tokenizer (tokenizer.json); this one is slow")
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    if model["type"] != "BPE":
        raise UserError(f"tokenizers of type {model['type']} are not written to GGUF; BPE is")
    # gguf reads files; these hold what the tokenizer does, nothing else.
    with scratch_folder() as scratch:
        tokenizer.save_pretrained(scratch)
        special = gguf.SpecialVocab(
            scratch,
            load_merges=True,
            special_token_types=("bos", "eos", "pad", "unk"),
        )
    if not special.merges:
        raise UserError("the tokenizer has no merges, without which llama.cpp does not load it")

    # Tokens and the rules that make them.
    by_id = {number: text for text, number in tokenizer.get_vocab().items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(vocab_size)]
    byte_fallback = bool(model.get("byte_fallback"))  # the SentencePiece form
    writer.add_tokenizer_model("llama" if byte_fallback else "gpt2")
    writer.add_token_list(tokens)
    if byte_fallback:
        writer.add_token_scores(_scores(tokens, special.merges))
        prepends = json.dumps([described["normalizer"], described["pre_tokenizer"]])
        first = '"prepend_scheme": "first"'
        writer.add_add_space_prefix("Prepend" in prepends or first in prepends)
        special.merges = []
    else:
        writer.add_tokenizer_pre(_rule_name(described["pre_tokenizer"]))
    added = {token["id"]: token for token in described["added_tokens"]}
    types = []
    for number, text in enumerate(tokens):
        types.append(_token_type(number, text, by_id, added, byte_fallback))
    writer.add_token_types(types)

    # Special tokens and the chat template.
    ids = tokenizer("a").input_ids
    special.load_merges = not byte_fallback
    special.add_special_token = {"bos": bool(ids) and ids[0] == tokenizer.bos_token_id}
    special.chat_template = None
    if isinstance(tokenizer.chat_template, str):
        special.chat_template = tokenizer.chat_template
    special.add_to_gguf(writer, quiet=True)


def _rule_name(pre: Json | None) -> str:
    """llama.cpp's name of a pre-tokenization rule. Raises UserError for an unknown one."""
    pre = pre or {"type": "none"}
    found = []
    for part in pre.get("pretokenizers") or [pre]:
        kind = part["type"]
        if kind == "Digits" and part["individual_digits"]:
            found.append("digits")
        elif kind == "ByteLevel" and not part["add_prefix_space"]:
            if part.get("use_regex", True):  # else it only maps bytes to characters
                found.append("bytes")
        elif kind == "Split" and "Regex" in part["pattern"] and part["behavior"] == "Isolated":
            found.append(part["pattern"]["Regex"])
        else:
            found.append(kind)
    if tuple(found) not in RULES:
        raise UserError(
            f"the tokenizer cuts text by {found}, for which no name of llama.cpp is known here "
            f"({', '.join(RULES.values())}); use its own converter"
        )
    return RULES[tuple(found)]


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Scores that make SentencePiece merge in BPE's order: the pair with the best score is merged
    first.

    A token's score is minus the first rank of a merge that makes it.
    """
    best: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        best.setdefault(merge.replace(" ", ""), rank)
    return [-float(best.get(token, len(merges))) for token in tokens]


def _token_type(
    number: int,
    text: str,
    by_id: dict[int, str],
    added: dict[int, Json],
    byte_fallback: bool,
) -> int:
    if number not in by_id:
        return gguf.TokenType.UNUSED
    if number in added:
        if added[number]["special"]:
            return gguf.TokenType.CONTROL
        return gguf.TokenType.USER_DEFINED
    if byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return gguf.TokenType.BYTE
    return gguf.TokenType.NORMAL
