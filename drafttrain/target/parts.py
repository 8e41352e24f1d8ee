"""The text part and the towers of a model that reads images, each loaded without the other.

    model                     Qwen2_5_VLForConditionalGeneration      the way to the text part
      model                   Qwen2_5_VLModel                         the way to the text part
        visual                                                        a tower
        language_model        Qwen2_5_VLTextModel                     the text part
      lm_head                                                         the text part

A `Target` holds the text part below its own way. `Sight` loads the towers below a second way and
puts the same text part there. Which module is which follows from the classes' `get_decoder` and
`get_output_embeddings`; no family is named.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def find_body(model: PreTrainedModel) -> PreTrainedModel:
    """The model below the head; of a model that reads images, that of its text."""
    found: nn.Module = model.get_decoder()
    if isinstance(found, PreTrainedModel) and found is not model:
        if found.get_output_embeddings() is None:
            return found
        return find_body(found)  # some models hold a whole language model, head included
    # The names mean something else in some families.
    for child in model.children():
        if isinstance(child, PreTrainedModel):
            return child
    return model


class Parts:
    """Which modules of a model belong to its text, and which to its towers.

    Attributes:
        way: the modules above the text part, from the model itself down.
        names: of the children by which the way goes on; the last is the text part's.
        towers: names of the modules beside the way. Weights that modules on the way hold themselves
            (LLaVA-NeXT's line break) are small, and belong to both.
    """

    def __init__(self, model: PreTrainedModel):
        body = find_body(model)
        named = dict(model.named_modules())
        path = next(name for name, module in named.items() if module is body)
        self.names = path.split(".") if path else []
        self.way: list[nn.Module] = []
        self.towers: list[str] = []
        self._body = body
        self._head = model.get_output_embeddings()
        text = {id(module) for module in body.modules()}
        text.add(id(self._head))
        module: nn.Module = model
        prefix = ""
        for name in self.names:
            self.way.append(module)
            for key, child in module.named_children():
                if not any(id(part) in text for part in child.modules()):
                    self.towers.append(prefix + key)
            prefix += f"{name}."
            module = getattr(module, name)

    def drop_towers(self) -> None:
        for name in self.towers:
            depth = name.count(".")
            key = name.rpartition(".")[2]
            self.way[depth]._modules.pop(key, None)

    def drop_text(self) -> None:
        for module in self.way:
            for key, child in list(module.named_children()):
                if child is self._body:
                    module._modules[key] = None
                elif child is self._head:  # classes without a model below the head call it
                    module._modules[key] = nn.Identity()

    def is_tower(self, name: str) -> bool:
        """Whether a weight of the files is a tower's; files may leave out the first names of the way."""
        for tower in self.towers:
            short = tower.rpartition(".")[2]
            if name.startswith((f"{tower}.", f"{short}.")):
                return True
        return False


def image_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class of transformers that reads images and text with this config, if any."""
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return None
    found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple) else found


def part_class(whole: type[PreTrainedModel], text: bool) -> type[PreTrainedModel]:
    """A class like `whole` that builds and loads the text part alone, or all but the text part.

    `whole_again` makes its models ones of `whole`.
    """

    class ModelPart(whole):  # type: ignore[misc,valid-type]
        def post_init(self):
            self.parts = Parts(self)
            if text:
                self.parts.drop_towers()
            else:
                self.parts.drop_text()
            super().post_init()
            kept = self.state_dict().keys()
            for name, source in list(self.all_tied_weights_keys.items()):
                if name not in kept or source not in kept:
                    del self.all_tied_weights_keys[name]

    # transformers looks up conversions of weights by the class's name, and its source by its module.
    ModelPart.__name__ = whole.__name__
    ModelPart.__module__ = whole.__module__
    return ModelPart


def whole_again(model: PreTrainedModel) -> Parts:
    """Gives a model of a `part_class` its own class; returns its parts."""
    parts: Parts = vars(model).pop("parts")
    model.__class__ = type(model).__mro__[1]
    return parts


def build_language_model(
    config: PreTrainedConfig,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal language model with weights of no value: what reads text, of one that reads images too.

    Args:
        dtype: the config's unless given.
    """
    options = {} if dtype is None else {"dtype": dtype}
    whole = image_class(config)
    if whole is None:
        return AutoModelForCausalLM.from_config(
            config,
            trust_remote_code=trust_remote_code,
            **options,
        )
    model = part_class(whole, text=True)._from_config(config, **options)
    whole_again(model)
    return model
