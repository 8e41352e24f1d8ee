"""Going on with a drafter that is already trained: on data of another domain, or for a target that was fine-tuned since."""

from __future__ import annotations

from typing import Any

from drafttrain.drafters.registry import load_trained
from drafttrain.errors import UserError
from drafttrain.target import Target


def continue_drafter(init: str, kind: Any, options: dict[str, Any], loss: str, target: Target) -> Any:
    """Loads a drafter of ours to train it further.

    What its weights were made for (sizes, kept vocabulary, feature layers, norms) stays as saved. How it is trained
    (`recipe_keys` of its config class, and the loss) follows the recipe.

    Args:
        init: its folder or Hub id. kind: the class that the recipe asks for. options: the recipe's `drafter:` keys.

    Raises:
        UserError: nothing there, another kind, a key that contradicts the saved one, or a target with another tokenizer,
            vocabulary, hidden size or depth.
    """
    drafter = load_trained(init, key="init")
    if drafter.kind != kind.kind:
        raise UserError(
            f"kind={kind.kind!r}, but init={init!r} holds a drafter of kind {drafter.kind!r}; set that kind"
        )
    config = drafter.config
    for name, value in options.items():
        saved = getattr(config, name)
        if name in getattr(config, "recipe_keys", ()):
            setattr(config, name, value)
        elif _plain(value) != _plain(saved):
            raise UserError(
                f"drafter.{name}={value!r}, but the drafter of init={init!r} has {saved!r}, and its weights fix that; drop "
                "the key, or train a new drafter with init=target"
            )
    config.loss = loss
    drafter.bind(target)
    config.target = target.identity()
    return drafter


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
