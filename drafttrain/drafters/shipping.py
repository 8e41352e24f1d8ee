"""Part three of the drafter contract: how a kind is written for engines, checked and served.

A kind's folder may hold an export.py that defines SHIPPING, an object of a subclass of `Shipping`:
formats and their unsupported features, writing, checking, recipes, card line. Most kinds are
shipped as config.json and our weights under an engine's names: they define engine_config and
engine_keys, and a form (form.py) where names or values differ; the same form serves writing,
checking and reading back. The commands export, import, verify and push, and the model card, use that object and
name no kind.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from drafttrain.drafters import registry
from drafttrain.drafters.common.configs import TargetedConfig
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.form import Form, Weight, fill, read_form
from drafttrain.drafters.kinds import kind_folders
from drafttrain.drafters.published_keys import Fixed, check_published
from drafttrain.drafters.read_back import compare_drafters
from drafttrain.errors import UserError, first_line
from drafttrain.files import Json, check_json
from drafttrain.formats.engines import SEEING_TARGETS, EngineRelease, engine_of
from drafttrain.formats.small_layers import (
    SCHEME_KEY,
    SMALL,
    round_layers,
    small_layers,
    widened,
    with_small_layers,
)
from drafttrain.formats.weights import (
    Shapes,
    architectures_in,
    check_kept_ids,
    check_names,
    check_weights,
    read_config,
    read_weights,
    write_checkpoint,
)
from drafttrain.target import Target
from drafttrain.target.loading import check_finite, seeing_target
from drafttrain.values import kinds_of

# Among vLLM's options: keys that the target's config gets, not the drafter's.
TARGET_OVERRIDES = "hf_overrides"
# Among transformers' options: generate gets both tokenizers, as the vocabularies differ.
TOKENIZERS = "tokenizers"
GGUF_NAME = "draft.gguf"  # the file of the gguf format
_DEPTH = 4  # tokens of the chains that prove an export

# Settings by the name of an engine, see `Shipping.options`.
EngineSettings = Mapping[str, Mapping[str, object]]
D = TypeVar("D", bound=TrainableDrafter)  # the kind's class


@dataclass(frozen=True)
class Trained:
    """A drafter on disk."""

    folder: Path
    kind: str  # its kind's name
    config: Json  # its config.json
    target: Json  # the recorded identity of its target; empty if none is recorded

    @property
    def target_name(self) -> str:
        return self.target.get("name", "")

    def load(self) -> TrainableDrafter:
        """Loads the drafter on the CPU, not bound to a target.

        Raises:
            UserError: its weights do not fit its config.
        """
        return registry.load_trained(str(self.folder))


class _RecordedTarget(TypedDict):
    """The part that is read of a drafter's record of its target."""

    name: NotRequired[str]


class _TargetRecord(TypedDict):
    target: NotRequired[_RecordedTarget | None]


def find_drafter(name: str) -> Trained:
    """Reads the config of a drafter, given by folder or Hub id.

    Raises:
        UserError: nothing there, not a drafter of ours, or a kind without weights.
    """
    kind = registry.kind_of(name)
    if kind not in registry.kinds() or not registry.kind_class(kind).trainable:
        raise UserError(
            f"drafter={name!r} has no weights to ship; give a trained drafter's folder or Hub id"
        )
    folder = registry.drafter_folder(name)
    config = read_config(folder)
    # A draft model's config.json is another library's: ours records the target next to it.
    recorded = read_config(folder, registry.META_FILE, missing=config)
    fix = "correct it in the drafter's config, or train it again"
    check_json(recorded, f"drafter={name!r}", fix, _TargetRecord)
    return Trained(folder, kind, config, recorded.get("target") or {})


class Format(NamedTuple):
    """A kind in one of FORMATS."""

    text: str  # what is written, for help texts and cards
    engines: tuple[str, ...]  # those of ENGINES that load it


class ExportRequest(NamedTuple):
    """Settings of an export."""

    output: Path  # folder to write
    dtype: torch.dtype = torch.bfloat16  # of the weights
    target: str = ""  # the target's name, empty if unknown; for keys that name it
    depth: int = 3  # speculative tokens per round, where a format records them
    source: str = ""  # where the target's config, tokenizer and weights are; `target` unless given
    layers: str = ""  # form of the layers' weights (formats/small_layers.py), if not as all others

    @property
    def target_files(self) -> str:
        """The folder or name from which the target's files load."""
        return self.source or self.target

    def target_of(self, trained: Trained) -> str:
        """`target_files`, or the target that the drafter records; empty if neither is known."""
        return self.target_files or trained.target_name


class Exported(NamedTuple):
    """A checkpoint in an engine's format: an export, or one that others have published."""

    where: str  # names it in errors
    config: Json  # its config.json
    weights: dict[str, Tensor]


class _Whole:
    """What an import knows instead of an original: it keeps the whole vocabulary, for a target."""

    mask = None

    def __init__(self, target: Json):
        self.kept_ids = torch.arange(target["vocab_size"])
        self.config = TargetedConfig(target=target)


def check_target(
    fields: Mapping[str, object],
    width: str,
    target: Json,
    where: str,
) -> None:
    """Checks that the fields of a drafter's config are for a target.

    Args:
        width: the field that holds the target's hidden size.

    Raises:
        UserError: they are for another one.
    """
    for key, field in (("hidden_size", width), ("vocab_size", "vocab_size")):
        if key in target and fields[field] != target[key]:
            raise UserError(
                f"{where} is for a target with {key}={fields[field]!r:.80}, but {target['name']!r} has {target[key]}"
            )


def _without_features(trained: Trained, engine: EngineRelease, algorithm: object) -> list[str]:
    """Why an engine cannot give a drafter the features of a target that reads images; empty if it can.

    algorithm: by which SGLang drafts; its classes differ by that.
    """
    known = SEEING_TARGETS.get((engine.name, str(algorithm)))
    if known is None or not trained.config.get("feature_layers"):
        return []
    # A target that cannot be loaded here is not judged.
    target = seeing_target(trained.target_name)
    if target is None or set(target.architectures) & set(known):
        return []
    named = ", ".join(target.architectures)
    asked = f" by {algorithm}" if algorithm else ""
    return [
        f"{engine.name} {engine.release} gives drafters no features of a target of class {named}{asked}"
    ]


class Shipping(Generic[D]):
    """How drafters of one kind are shipped; the base class is for kinds that no engine loads.

    Attributes:
        formats: the formats that the kind can be written in, by name.
        verifiable: engines that `drafttrain verify` runs the kind in (`vllm`, `transformers`,
            `llama.cpp`, see export/engine_runs.py), and the format that each is given. needs_gpu:
            engines that run the kind on GPUs only.
        small_layers: by format, the forms of layers (formats/small_layers.py) that it was tried with.
        in_root: formats that a published repository holds in its root, with our own keys added;
            others get a folder each.
        reads: published checkpoints that `drafttrain import` reads, for messages. architectures:
            their names in config.json. published_keys: keys of theirs that are read, or checked
            elsewhere. fixed_keys: keys of which ours computes some values only.
        description: half a sentence for the card, with places for the config's keys and the words
            of `line`.
        no_format: why the kind cannot be written in a format that `formats` lacks.
        drafter_class: the kind's class.
        engine_keys: keys of an export's config.json that hold a field of the drafter's config, and
            that field.
        depth_key: the config's key for the tokens that the kind drafts per round at most; empty for
            any number.
        serving: what `options` returns, for kinds whose settings are the same for every drafter.
        own_drafting: for kinds without weights, what to type where an engine drafts so by itself,
            with {target} and {depth}.
        tiny: `drafter.*` keys of the tiny drafter of `drafttrain verify --all-kinds`, one that most
            formats can express.
    """

    formats: Mapping[str, Format] = {}
    verifiable: Mapping[str, str] = {}
    needs_gpu: tuple[str, ...] = ()
    small_layers: Mapping[str, tuple[str, ...]] = {}
    in_root: Sequence[str] = ()
    reads = ""
    architectures: tuple[str, ...] = ()
    published_keys: Collection[str] = ()
    fixed_keys: Mapping[str, Fixed] = {}
    description = "of kind {kind}, {parameters} parameters"
    no_format = "no {form} format is known for kind {kind!r}"
    drafter_class: type[D]
    engine_keys: Mapping[str, str] = {}
    depth_key = ""
    serving: EngineSettings = {}
    own_drafting: Mapping[str, str] = {}
    tiny: Mapping[str, object] = {}

    def line(self, trained: Trained, parameters: str) -> str:
        """Describes the drafter in half a sentence, for the card.

        parameters: their number, as text.
        """
        config = trained.config
        words = dict(config)
        words["kind"] = trained.kind
        words["parameters"] = parameters
        layers = config.get("num_hidden_layers", 1)
        words["layers"] = "one decoder layer" if layers == 1 else f"{layers} decoder layers"
        words["features"] = ", ".join(map(str, config.get("feature_layers", [])))
        kept = config.get("draft_vocab_size", 0)
        words["kept"] = f"{kept:,} of its {config.get('vocab_size', 0):,} tokens"
        return self.description.format(**words)

    def load(self, trained: Trained) -> D:
        """The drafter, on the CPU and not bound to a target."""
        return cast(D, trained.load())  # it is of this kind

    # -- writing -----------------------------------------------------------------------------------

    def unsupported(
        self,
        trained: Trained,
        form: str,
        engine: EngineRelease | None = None,
    ) -> list[str]:
        """The drafter's features that an engine does not support in a format; empty if none.

        Args:
            engine: by default the one that the format is written for, see `engine_of`.
        """
        if form not in self.formats:
            return [self.no_format.format(form=form, kind=trained.kind)]
        if engine is None:
            engine = engine_of(form)
        algorithm = self.options(trained).get(engine.name, {}).get("speculative-algorithm", "")
        return self.lacking(trained, form, engine) + _without_features(trained, engine, algorithm)

    def unserved(self, trained: Trained, form: str, engine: EngineRelease) -> list[str]:
        """Why an engine does not draft with an export in a format; empty if it does."""
        # A kind may say better why it is not written in an engine's format.
        explained = form not in self.formats and self.no_format != Shipping.no_format
        if engine.name not in self.options(trained) and not explained:
            return [f"it knows no drafter of kind {trained.kind}"]
        return self.unsupported(trained, form, engine)

    def lacking(self, trained: Trained, form: str, engine: EngineRelease) -> list[str]:
        """The drafter's features that an engine does not support in one of `formats`."""
        return []

    def write(self, trained: Trained, form: str, request: ExportRequest) -> list[Path]:
        """Writes a drafter that the format supports, as config.json and model.safetensors.

        Returns:
            The files written.

        Raises:
            UserError: something is missing, or the output cannot be written.
        """
        drafter = self.load(trained)
        config = self.engine_config(drafter, form, request)
        weights = self.engine_weights(drafter, config)
        if request.layers:
            config, weights = with_small_layers(SMALL[request.layers], config, weights)
        return write_checkpoint(request.output, config, weights, request.dtype)

    def engine_config(self, drafter: D, form: str, request: ExportRequest) -> Json:
        """The config.json of an export."""
        raise NotImplementedError

    def form(self, drafter: D, config: Json) -> Form:
        """Every tensor that an engine's loader expects. config: the export's."""
        return {name: Weight(name) for name in drafter.state_dict() if name != "kept_ids"}

    def engine_weights(self, drafter: D, config: Json) -> dict[str, Tensor]:
        """Every tensor of an export, by the engine's name. config: the export's."""
        return fill(self.form(drafter, config), drafter.state_dict())

    def engine_shapes(self, drafter: D, config: Json) -> Shapes:
        """The shape of every tensor of an export. config: the export's."""
        weights = self.engine_weights(drafter, config)
        return {name: tuple(value.shape) for name, value in weights.items()}

    def publish(self, trained: Trained, request: ExportRequest) -> list[tuple[str, str]]:
        """Writes the weight files of a repository: our own format, and each engine's in a folder.

        Args:
            request: output is the repository's folder, target the name to publish.

        Returns:
            Weight files with their purpose.
        """
        drafter = trained.load()
        drafter.config.target = {**trained.target, "name": request.target}
        drafter.to(request.dtype).save_pretrained(request.output)  # type: ignore[arg-type]
        files = [("model.safetensors", "the drafter, for drafttrain")]
        files += self.publish_gguf(trained, request)
        for form, described in self.formats.items():
            if form == "gguf":
                continue
            reason = "; ".join(self.unsupported(trained, form)) or self.withheld(trained, form)
            if reason:
                print(f"no {form} format: {reason}")
                continue
            self.write(trained, form, request._replace(output=request.output / form))
            purpose = f"{described.text}, for {', '.join(described.engines)}"
            files.append((f"{form}/model.safetensors", purpose))
        return files

    def publish_gguf(self, trained: Trained, request: ExportRequest) -> list[tuple[str, str]]:
        """Writes draft.gguf into a repository's root, or prints why the drafter has none.

        Returns:
            As `publish`.
        """
        if "gguf" not in self.formats:
            return []
        try:
            reasons = self.unsupported(trained, "gguf")
            if reasons:
                raise UserError("; ".join(reasons))
            self.write(trained, "gguf", request)
        except UserError as error:
            print(f"no GGUF file: {error}")
            return []
        return [(GGUF_NAME, f"{self.formats['gguf'].text}, for llama.cpp")]

    def withheld(self, trained: Trained, form: str) -> str:
        """Why `publish` leaves out a format that the drafter can be exported in; empty if not."""
        return ""

    # -- checking ----------------------------------------------------------------------------------

    def exported_weights(self, exported: Path) -> dict[str, Tensor]:
        """Every tensor of an export, also from files that only some kinds have."""
        return widened(read_config(exported), read_weights(exported))

    def drafter_from(self, original: D, export: Exported) -> D:
        """A drafter with the shapes and flags of an export, as an engine reads its keys.

        Its weights do not matter.

        Args:
            original: gives what a format leaves to the target or the engine, such as the kept ids.
        """
        kept = original.kept_ids
        target = original.config.target
        fields: Json = {ours: export.config[theirs] for theirs, ours in self.engine_keys.items()}
        fields["draft_vocab_size"] = len(kept)
        fields |= self.more_fields(original, export)
        config_class = self.drafter_class.config_class
        check_target(fields, config_class.width_field or "hidden_size", target, export.where)
        back = self.drafter_class(config_class(**fields, target=target))
        back.kept_ids = kept.clone()
        return back

    def more_fields(self, original: D, export: Exported) -> Json:
        """Fields of an export's drafter that no key of its config.json holds as they are."""
        return {}

    def drafter_weights(
        self,
        original: D,
        back: D,
        export: Exported,
    ) -> dict[str, Tensor]:
        """The state dict of `back`, from an export's weights.

        Kept ids that the export does not hold are the original's.
        """
        state = {"kept_ids": original.kept_ids}
        state |= read_form(self.form(back, export.config), export.weights, export.where)
        check_kept_ids(state["kept_ids"], back.config.vocab_size, export.where)
        return state

    def checked_depth(self, config: Json) -> int:
        """Tokens that an export drafts per round, for the chains of `check`."""
        if self.depth_key:
            return config[self.depth_key]
        return _DEPTH

    def check(self, trained: Trained, exported: Path) -> Json:
        """Proves an export.

        Its tensors are those that an engine's loader expects, and read back it drafts what the
        drafter does.

        Returns:
            Figures for the report: rounds, depth, max_log_prob_difference, same_tokens.

        Raises:
            UserError: a tensor is missing, unknown, of another shape or dtype or not finite, or the
                drafts differ.
        """
        where = repr(str(exported))
        config = read_config(exported)
        export = Exported(where, config, self.exported_weights(exported))
        original = self.load(trained)
        layers = small_layers(config)
        if layers is not None:
            round_layers(layers, original)
        try:
            back = self.drafter_from(original, export)
            dtype = check_weights(export.weights, self.engine_shapes(back, config), config, where)
            back.load_state_dict(self.drafter_weights(original, back, export))
            return self.compare(original, back, dtype, self.checked_depth(config), where)
        except KeyError as error:
            raise UserError(
                f"{where}: config.json has no {error}, which engines need; export again"
            ) from error
        except (RuntimeError, IndexError) as error:  # shapes that do not go together
            raise UserError(
                f"{where} does not fit the drafter ({first_line(error)}); pass its own export"
            ) from error

    def compare(
        self,
        original: D,
        back: D,
        dtype: torch.dtype,
        depth: int,
        where: str,
    ) -> Json:
        """Compares the drafts of a drafter and of its export; see `compare_drafters`."""
        return compare_drafters(original, back, dtype, depth, where)

    # -- serving -----------------------------------------------------------------------------------

    def options(self, trained: Trained) -> EngineSettings:
        """Settings with which each of ENGINES drafts with this kind.

        An engine without an entry knows no such drafter. Model and number of tokens are added; a
        value here wins, and None drops the key.

        vLLM: keys of --speculative-config (method), and TARGET_OVERRIDES.
        SGLang: flags of launch_server (speculative-algorithm).
        TensorRT-LLM: keys of speculative_config (decoding_type).
        llama.cpp: flags of llama-server (spec-type).
        transformers: arguments of `generate`, for drafters that are no language models
            speculation_type, and TOKENIZERS.
        """
        return self.serving

    def shares_vocabulary(self, trained: Trained, target: Target) -> bool:
        """Whether token ids mean the same to drafter and target, as they must in our decoder."""
        return True

    def block_depth(self, trained: Trained) -> int:
        """Tokens per round of kinds that always draft the same number; 0 for others."""
        return 0

    # -- importing ---------------------------------------------------------------------------------

    def check_published(self, checkpoint: Exported) -> None:
        """Checks that ours computes what a published config.json says, and that every key is known.

        Raises:
            UserError: names the keys, or what they say.
        """
        read = set(self.published_keys)
        if small_layers(checkpoint.config) is not None:
            read.add(SCHEME_KEY)
        if "drafter_kind" in checkpoint.config:  # a drafter of ours
            read |= {"drafter_kind", *kinds_of(self.drafter_class.config_class)}
        reasons = self.foreign(checkpoint)
        check_published(
            checkpoint.config,
            read,
            self.fixed_keys,
            checkpoint.where,
            reasons,
        )

    def foreign(self, checkpoint: Exported) -> list[str]:
        """What a published checkpoint computes otherwise than ours, where no single key says it."""
        return []

    def recognizes(self, config: Mapping[str, object]) -> bool:
        """Whether a published checkpoint's config.json is of this kind."""
        return any(name in self.architectures for name in architectures_in(config))

    def published(self, checkpoint: Exported, target: Json) -> Exported:
        """A published checkpoint in the engine's format that the kind is written in.

        It is returned unchanged where other trainers write that format.

        Raises:
            UserError: it computes what ours cannot.
        """
        return checkpoint

    def read(self, folder: Path, target: Json, allow_pickle: bool = False) -> D:
        """Reads a published checkpoint as one of our drafters, on the CPU in its dtype.

        Args:
            target: identity of its target, see `Target.identity`.

        Raises:
            UserError: it computes what ours cannot, lacks weights, or was trained for another
                target.
        """
        where = repr(str(folder))
        config = read_config(folder)
        weights = self.published_weights(folder, allow_pickle)
        weights = widened(config, weights)
        found = Exported(where, config, weights)
        try:
            self.check_published(found)
            export = self.published(found, target)
            like = cast(D, _Whole(target))
            with torch.device("meta"):
                drafter = self.drafter_from(like, export)
            shapes = self.engine_shapes(drafter, export.config)
            for name, weight in self.form(drafter, export.config).items():
                if isinstance(weight, Weight) and weight.back is None:
                    del shapes[name]
            check_names(export.weights, shapes, where)
            check_finite(export.weights.items(), where, "get an intact copy of it")
            state = self.drafter_weights(like, drafter, export)
            drafter.load_state_dict(state, assign=True)
        except KeyError as error:
            raise UserError(f"{where}: config.json has no {error}; it is needed") from error
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise UserError(
                f"{where} has values of another form ({first_line(error)}); get an intact copy of it"
            ) from error
        largest = max(export.weights.values(), key=Tensor.numel)  # [vocabulary, width]
        return cast(D, drafter.to(largest.dtype).eval())  # type: ignore[arg-type]

    def published_weights(self, folder: Path, allow_pickle: bool) -> dict[str, Tensor]:
        """Every tensor of a published checkpoint, also from files that only some kinds have."""
        return read_weights(folder, allow_pickle)


def shipped_kinds() -> list[str]:
    """The kinds that have an export module."""
    return list(kind_folders("export.py"))


def shipping(kind: str) -> Shipping:
    """How a kind is shipped."""
    if kind not in shipped_kinds():
        return Shipping()
    return importlib.import_module(f"{__package__}.{kind}.export").SHIPPING


def format_lines(kind: str) -> list[str]:
    """A kind's formats, a line each; formats in which the same is written share one."""
    formats = shipping(kind).formats
    lines = []
    for described in dict.fromkeys(formats.values()):
        names = ", ".join(form for form, other in formats.items() if other == described)
        lines.append(f"{names:<27} {described.text} ({'; '.join(described.engines)})")
    return lines


def check_expressible(trained: Trained, form: str, release: str = "") -> Shipping:
    """The shipping of the drafter's kind, if the format supports the drafter.

    Args:
        release: of the format's engine; the newest known one unless given.

    Raises:
        UserError: unsupported features, every one.
    """
    kind = shipping(trained.kind)
    engine = engine_of(form).of_release(release)
    reasons = kind.unsupported(trained, form, engine)
    if not reasons:
        return kind
    what = f"format={form!r} cannot express this drafter"
    if release:
        what += f" for {engine.name} {engine.release}"
        if not kind.unsupported(trained, form):
            newest = engine_of(form).release
            raise UserError(f"{what}: {'; '.join(reasons)}; without --engine-version, {newest} can")
    # Formats that can express the drafter.
    others = [other for other in kind.formats if not kind.unsupported(trained, other)]
    fix = "drafttrain eval, generate and push work with it"
    if others:
        fix = f"--format {' or '.join(others)} can"
    raise UserError(f"{what}: {'; '.join(reasons)}; {fix}")
