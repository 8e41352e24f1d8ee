"""Prompts with images: the towers of a target, its processor, and the forward that reads both.

A target that reads images is loaded without its towers. The first prompt with images loads them. The
whole prompt is then one forward of the model's own class, around the target's text part:

    own class     pixels -> towers -> image tokens' embeddings -> positions, masks, token types
    text part     every layer attends by the model's own masks; its keys and values go to our cache
    afterwards    text only: the decoder's usual forwards, at position index + shift

M-RoPE gives all tokens of an image few positions, so text behind an image stands at its index plus a
shift, which the row of the cache keeps. Each forward has copies of the modules above the text part:
what a class remembers of a prompt (`rope_deltas`) ends with the call.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import ModelOutput

from drafttrain.batch import TargetOutput
from drafttrain.errors import UserError
from drafttrain.extras import require
from drafttrain.images import Picture
from drafttrain.ops.packing import without_grad
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.target.attention import LAST, attention_context
from drafttrain.target.loading import load_part, loading, model_config
from drafttrain.target.parts import Parts, image_class
from drafttrain.target.proof import (
    ProvenModel,
    by_precision,
    described,
    proof_tokens,
    relative_error,
    unsupported,
)
from drafttrain.target.snapshots import SnapshotCache

_FIX = "use a target whose processor transformers has"
_LOADABLE = "download the target again"
_TAIL = 3  # text tokens of the proof
# Largest relative errors of the proof's states, in float32 and in half precision.
_STATES = 1e-3
_STATES_HALF = 0.2
_loading = threading.Lock()
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """A prompt with images, as a target reads it.

    Attributes:
        ids: [L] int64, each image expanded to its placeholder tokens.
        tensors: what the processor gives besides ids and mask (pixels, grids, token types).
        digests: of its pictures, in order.
    """

    ids: Tensor
    tensors: dict[str, Tensor]
    digests: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)


class _Read(NamedTuple):
    """A forward over a prompt with images."""

    out: TargetOutput
    shift: int  # position of the next token less its index
    whole: nn.Module  # the copy that ran
    made: list[ModelOutput]  # of its text part


class Sight:
    """How a target reads images. Holds no state of a call.

    Args:
        target: proven, of a class that reads images.

    Attributes:
        trust_remote_code: run code that comes with the processor.
    """

    def __init__(self, target: ProvenModel):
        self.target = target
        self.trust_remote_code = False
        self._processor: ProcessorMixin | None = None
        # The model's class without its text part, the names of the children on the way to that,
        # and the format of its weights.
        self._eyes: PreTrainedModel | None = None
        self._names: list[str] = []
        self._form: tuple[torch.device, torch.dtype] | None = None
        self._proven = False

    # -- prompts -----------------------------------------------------------------------------------

    @property
    def processor(self) -> ProcessorMixin:
        """transformers' processor of the target, loaded on first use.

        Raises:
            UserError: the target has none, or Pillow or a torchvision that it needs is missing.
        """
        with _loading:
            if self._processor is None:
                self._processor = self._load_processor()
        return self._processor

    def _load_processor(self) -> ProcessorMixin:
        from transformers import AutoProcessor  # brings modules of images that text never needs

        what = f"target={self.target.name!r}: its processor"
        require("PIL", what)
        try:
            with loading(what, _FIX):
                found = AutoProcessor.from_pretrained(
                    self.target.path,
                    trust_remote_code=self.trust_remote_code,
                )
        except UserError as error:
            if "Torchvision" in str(error):  # said in many lines
                require("torchvision", what)
            raise
        if getattr(found, "image_processor", None) is None:
            raise UserError(f"{what} reads no images ({type(found).__name__}); {_FIX}")
        return found

    def prompt(self, text: str, pictures: Sequence[Picture]) -> ImagePrompt:
        """See `Target.image_prompt`."""
        processor = self.processor
        pixels = [picture.pixels() for picture in pictures]
        try:
            made = processor(
                text=[text],
                images=pixels or None,
                add_special_tokens=False,
                return_tensors="pt",
            )
        except Exception as error:  # code of other libraries
            raise UserError(
                f"target={self.target.name!r}: its processor refuses a prompt with {len(pixels)} images "
                f"({described(error)}); give one image per marker of the chat template"
            ) from error
        tensors = {}
        for name, value in made.items():
            if name in ("input_ids", "attention_mask"):
                continue
            if not isinstance(value, Tensor):
                raise UserError(
                    f"target={self.target.name!r}: its processor gives {name} as {type(value).__name__}, not as a "
                    "tensor; use images of one size"
                )
            tensors[name] = value
        digests = tuple(picture.digest for picture in pictures)
        return ImagePrompt(made["input_ids"][0], tensors, digests)

    @property
    def template(self) -> str | None:
        """The processor's chat template; None where it has none, and the tokenizer's counts."""
        found = getattr(self.processor, "chat_template", None)
        if isinstance(found, str):
            return found
        return None

    @property
    def placeholder(self) -> int:
        """The token that stands for a part of an image. Raises UserError: the config names none."""
        config = self.target.model.config
        # A shell has the config of the text part, where that has a class of its own.
        if image_class(config) is None:
            config = model_config(self.target.path, self.trust_remote_code)
        for key in ("image_token_id", "image_token_index"):
            found = getattr(config, key, None)
            if isinstance(found, int):
                return found
        fault = (
            "has no image_token_id in its config, so rows with images are not read; use text only"
        )
        raise unsupported(self.target, fault)

    def row(self, ids: Tensor, pictures: Sequence[Picture]) -> ImagePrompt:
        """See `Target.image_row`.

        The processor reads a message of the pictures. What it says about pictures is that of
        the row; what it says about tokens goes by their ids.
        """
        marked = self.prompt(self._markers(len(pictures)), pictures)
        wanted = int((marked.ids == self.placeholder).sum())
        held = int((ids == self.placeholder).sum())
        if held != wanted:
            raise UserError(
                f"target={self.target.name!r}: a row has {held} placeholders (token {self.placeholder}), but its "
                f"{len(pictures)} images take {wanted}; generate it with this target"
            )
        tensors = {}
        for name, value in marked.tensors.items():
            if value.shape == (1, len(marked)):
                value = self._by_id(ids, marked, name)
            tensors[name] = value
        return ImagePrompt(ids, tensors, marked.digests)

    def marked_ids(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """A stored row with each image as its marker, of which the processor makes placeholders again.

        Args:
            ids: [L] each image expanded to its placeholder tokens. pictures: of the row, in order.

        Raises:
            UserError: as `processor`; the row does not hold the tokens of its pictures.
        """
        text = self._markers(1)
        marked = self.target.tokenizer(text, add_special_tokens=False)["input_ids"]
        found: list[int] = []
        left = list(ids)
        for number, picture in enumerate(pictures, 1):
            expanded = self.prompt(text, [picture]).ids.tolist()
            marker, tokens = _apart(marked, expanded, self.placeholder)
            # Pictures come in order, so an image's tokens are the first that match.
            at = _first(left, tokens)
            if at is None:
                raise UserError(
                    f"target={self.target.name!r}: a row of {len(ids)} tokens does not hold the {len(tokens)} tokens "
                    f"of its image {number}; generate it with this target"
                )
            found += left[:at] + marker
            left = left[at + len(tokens) :]
        return found + left

    def _markers(self, count: int) -> str:
        """A message of so many images, as the chat template writes it.

        Its text makes it longer than what tensors say about an image, such as its two sides.
        """
        image = {"type": "image", "image": "image"}
        text = {"type": "text", "text": "0 1 2 3 4 5 6 7 8 9"}
        message = {"role": "user", "content": [*[image] * count, text]}
        tokenizer: PreTrainedTokenizerBase = self.processor.tokenizer
        try:
            written = tokenizer.apply_chat_template(
                [message],  # type: ignore[arg-type]  # contents may be parts
                tokenize=False,
                chat_template=self.template,
            )
        except Exception as error:  # templates are code of others
            raise UserError(
                f"target={self.target.name!r}: its chat template refuses a message of {count} images "
                f"({described(error)}); use a target whose template writes images"
            ) from error
        assert isinstance(written, str)
        return written

    def _by_id(self, ids: Tensor, marked: ImagePrompt, name: str) -> Tensor:
        """[1, L] the values that a processor's tensor has at these tokens; 0 at tokens of text.

        Raises UserError: a token has two values.
        """
        values = marked.tensors[name][0]
        pairs = set(zip(marked.ids.tolist(), values.tolist(), strict=True))
        value_of = dict(pairs)
        if len(value_of) < len(pairs):
            raise UserError(
                f"target={self.target.name!r}: its processor gives {name} by place and not by token, so rows with "
                "images are not read; use text only"
            )
        row = [value_of.get(token, 0) for token in ids.tolist()]
        return torch.tensor([row], dtype=values.dtype)

    # -- forwards ----------------------------------------------------------------------------------

    @without_grad
    def read(self, prompt: ImagePrompt, feature_layers: Sequence[int]) -> TargetOutput:
        """See `Target.read_images`."""
        self._prove(prompt)
        return self._run(prompt, feature_layers).out

    @without_grad
    def prefill(
        self,
        prompt: ImagePrompt,
        feature_layers: Sequence[int],
        cache: TreeCache | SnapshotCache,
        row: int,
    ) -> TargetOutput:
        """Reads a prompt into an empty row of a decoder's cache, and commits all its tokens.

        Returns:
            States [1, L, ...].
        """
        self._prove(prompt)
        return self._fill(prompt, feature_layers, cache, row)

    def _fill(
        self,
        prompt: ImagePrompt,
        feature_layers: Sequence[int],
        cache: TreeCache | SnapshotCache,
        row: int,
    ) -> TargetOutput:
        cache.open([(row, len(prompt))])
        if isinstance(cache, SnapshotCache):
            read = self._run(prompt, feature_layers, use_cache=True)
            cache.adopt(row, read.made[0])
        else:
            read = self._run(prompt, feature_layers, keys=cache)
        cache.commit([range(len(prompt))])
        cache.shifts[row] = read.shift
        return read.out

    def _run(
        self,
        prompt: ImagePrompt,
        feature_layers: Sequence[int],
        keys: TreeCache | None = None,
        use_cache: bool = False,
    ) -> _Read:
        """One forward of the whole model.

        Args:
            keys: stores the text part's keys and values. use_cache: in the model's own cache.
        """
        target = self.target
        target.check_length(len(prompt))
        target.hook(feature_layers)
        whole, body = self._assembled()
        given: list[Tensor | None] = []
        made: list[ModelOutput] = []
        body.register_forward_pre_hook(
            lambda _module, _args, options: given.append(options.get("position_ids")),
            with_kwargs=True,
        )
        body.register_forward_hook(lambda _module, _args, output: made.append(output))
        tensors = {}
        for name, value in prompt.tensors.items():
            value = value.to(target.device)
            tensors[name] = value.to(target.compute_dtype) if value.is_floating_point() else value
        caught: dict[int, Tensor] = {}
        try:
            with attention_context(None, caught, keys):
                whole(input_ids=prompt.ids[None].to(target.device), use_cache=use_cache, **tensors)
        except UserError:
            raise
        except Exception as error:  # code of other libraries
            raise self._unread(prompt, described(error)) from error
        if len(made) != 1:
            raise self._unread(prompt, f"its text part runs {len(made)} times")
        shift = 0
        if given[0] is not None:
            # [axes, 1, L], the last three of which rotate; or [1, L].
            shift = int(given[0][-3:].max()) + 1 - len(prompt)
        last = made[0]["last_hidden_state"].to(target.device)
        caught[LAST] = last
        out = TargetOutput.of(caught, feature_layers, last)
        return _Read(out, shift, whole, made)

    def _assembled(self) -> tuple[nn.Module, nn.Module]:
        """The model below the head and its text part, as copies down to the text part.

        What is below is shared. Hooks, and what a forward sets on a module, are this call's own.
        """
        body = _shallow(self.target.body)
        with _loading:
            eyes = self._load()
        way = [_shallow(eyes)]
        for name in self._names[:-1]:
            child = _shallow(getattr(way[-1], name))
            way[-1]._modules[name] = child
            way.append(child)
        way[-1]._modules[self._names[-1]] = body
        inner = way[0].base_model
        if any(inner is module for module in way):
            return inner, body
        return way[0], body

    def _load(self) -> PreTrainedModel:
        """The model's class without its text part, where the target computes."""
        target = self.target
        form = (target.device, target.compute_dtype)
        if self._eyes is None:
            parts = Parts(target.model)
            self._names = parts.names
            if parts.towers:  # a loaded model that was wrapped
                self._eyes = target.model
                self._form = form
            else:
                self._eyes = self._load_eyes()
                self._form = form
        if self._form != form:  # the text part moved, or computes in float32 now
            nn.Module.to(self._eyes, device=target.device, dtype=target.compute_dtype)
            self._form = form
        return self._eyes

    def _load_eyes(self) -> PreTrainedModel:
        target = self.target
        what = f"target={target.name!r}: its vision part"
        with loading(what, _LOADABLE):
            config = model_config(target.path, self.trust_remote_code)
        eyes = load_part(
            type(target.model),
            target.path,
            what,
            _LOADABLE,
            text=False,
            config=config,
            dtype=target.compute_dtype,
            device_map={"": target.device},
        )
        # It makes masks for the text part, in the form that the text part's attention reads.
        text = eyes.config.get_text_config()
        text._attn_implementation = target.body.config._attn_implementation
        return eyes.eval().requires_grad_(False)

    # -- proof -------------------------------------------------------------------------------------

    def _prove(self, prompt: ImagePrompt) -> None:
        """Proves, on the first prompt, that decoding continues as the model itself does.

        A few tokens behind the prompt are read one by one by the model's own class with its own
        cache, which finds their positions itself, and at once by the decoder's.

        Raises:
            UserError: other states; names the relative error.
        """
        if self._proven:
            return
        target = self.target
        tail = proof_tokens(target, len(prompt) + _TAIL)
        seen = set(prompt.ids.tolist())
        # No placeholder of an image may be among them.
        tail = torch.tensor([token for token in tail.tolist() if token not in seen][:_TAIL])
        tail = tail[None].to(target.device)  # [1, _TAIL]
        own = self._run(prompt, (), use_cache=True)
        cache = own.made[0].get("past_key_values")
        try:
            for token in tail.split(1, dim=1):
                with attention_context(None):
                    own.whole(input_ids=token, past_key_values=cache, use_cache=True)
        except Exception as error:  # code of other libraries
            raise self._unread(prompt, described(error)) from error
        expected = torch.cat([output["last_hidden_state"] for output in own.made[1:]], dim=1)

        ours: TreeCache | SnapshotCache
        if target.continuation is None:
            ours = TreeCache(len(prompt) + _TAIL, dtype=target.dtype)
        elif target.continuation.form is None:
            raise self._unread(prompt, str(target.continuation))
        else:
            ours = SnapshotCache(target, len(prompt) + _TAIL)
        self._fill(prompt, (), ours, 0)
        ours.open([(0, tail.shape[1])])
        at = ours.positions(tail.device)
        got = target.forward(tail, (), at, ours).last_hidden  # type: ignore[arg-type]  # either cache
        off = relative_error(got, expected)
        if not off <= by_precision(target, _STATES, _STATES_HALF):
            reason = f"it continues them in another way than text, relative error {off:.2g}"
            raise self._unread(prompt, reason)
        self._proven = True

    def _unread(self, prompt: ImagePrompt, reason: str) -> UserError:
        fault = f"cannot decode a prompt with {len(prompt.digests)} images ({reason}); give it text only"
        return unsupported(self.target, fault)


def _apart(marked: list[int], expanded: list[int], placeholder: int) -> tuple[list[int], list[int]]:
    """The marker of a message of one image, and the tokens that stand for it.

    Args:
        marked, expanded: the message before and after the processor.
        placeholder: belongs to the marker where it is part of it.
    """
    # Tokens that both sides share are text, but a marker is never empty.
    begin_limit = len(marked) - 1
    end_limit = len(marked) - 1
    if placeholder in marked:
        begin_limit = marked.index(placeholder)
        end_limit -= begin_limit
    begin = _shared(marked, expanded, begin_limit)
    end = _shared(marked[::-1], expanded[::-1], min(end_limit, len(marked) - 1 - begin))
    return marked[begin : len(marked) - end], expanded[begin : len(expanded) - end]


def _shared(left: list[int], right: list[int], limit: int) -> int:
    """Number of first tokens that are the same, at most `limit`."""
    for count in range(limit):
        if left[count] != right[count]:
            return count
    return limit


def _first(tokens: list[int], wanted: list[int]) -> int | None:
    """Where some tokens first occur; None if they do not."""
    for at in range(len(tokens) - len(wanted) + 1):
        if tokens[at : at + len(wanted)] == wanted:
            return at
    return None


def _shallow(module: M) -> M:
    """A copy of a module that shares its children and weights; hooks, names and attributes are its own."""
    made = copy.copy(module)
    for key, value in vars(module).items():
        if isinstance(value, dict):
            vars(made)[key] = copy.copy(value)
    vars(made).pop("forward", None)  # of a spread model: it is bound to the original
    return made
