"""The notation of a loss: `kl`, `js:0.5`, `kl@2`, `0.9*kl+0.1*ce`.

    LOSS   TERM+TERM+...
    TERM   [WEIGHT*]NAME[:PARAMETER][@TEMPERATURE]

The parameter is beta of `js` and eta of `lk_lambda`. The temperature divides both sides' logits, so
`tv@0.6` is the rejection rate of decoding at temperature 0.6. The loss is not multiplied by the
squared temperature: write `4*kl@2` for that.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from drafttrain.errors import UserError, did_you_mean, shown
from drafttrain.values import number as read_number

# `divergence.DIVERGENCES` maps each name to its function; the kernel takes weights in this order.
NAMES = ("kl", "reverse_kl", "js", "tv", "tvd++", "lk_alpha", "lk_lambda", "ce")
_DEFAULTS = {"js": 0.5, "lk_lambda": 3.0}  # parameters, of the losses that take one
ACCEPTANCE = ("tv", "tvd++", "lk_alpha", "lk_lambda")  # they read the target's full distribution
_MOST_TERMS = 16
# Weight, name, parameter, temperature. The name tvd++ holds the sign that separates terms.
_TERM = re.compile(r"(?:([^*+:@]*)\*)?(tvd\+\+|[^*+:@]*)(?::([^*+:@]*))?(?:@([^*+:@]*))?(?:\+|$)")


@dataclass(frozen=True)
class Term:
    """One term: weight * name, its parameter (0 if it takes none) and temperature."""

    name: str
    weight: float = 1.0
    parameter: float = 0.0
    temperature: float = 1.0

    def __str__(self) -> str:
        text = self.name
        if self.weight != 1:
            text = f"{self.weight:g}*{text}"
        if self.parameter != _DEFAULTS.get(self.name, 0):
            text += f":{self.parameter:g}"
        if self.temperature != 1:
            text += f"@{self.temperature:g}"
        return text


@dataclass(frozen=True)
class Loss:
    """A weighted sum of divergences."""

    terms: tuple[Term, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.terms))

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures other than 1 at which the loss reads the target's full distribution."""
        found = {term.temperature for term in self.terms if term.name in ACCEPTANCE}
        return tuple(sorted(found - {1.0}))


@functools.cache
def parse_loss(text: str) -> Loss:
    """Parses a loss as recipes write it.

    Raises:
        UserError: malformed, an unknown name (with close matches), or a number out of range.
    """
    named = f"loss={shown(text)}"
    if text.count("+") > 3 * _MOST_TERMS or len(text) > 1000:  # bounds the work of parsing
        raise UserError(
            f"{named} is too long: a loss has at most {_MOST_TERMS} terms, such as 0.9*kl+0.1*ce"
        )
    clean = text.replace(" ", "")
    place = 0
    terms: list[Term] = []
    while place < len(clean) or not terms:
        match = _TERM.match(clean, place)
        if match is None or match.end() == place:
            raise UserError(
                f"{named} is not [WEIGHT*]NAME[:PARAMETER][@TEMPERATURE]+...; write kl or 0.9*kl+0.1*ce"
            )
        weight, name, parameter, temperature = match.groups()
        terms.append(_term(named, weight, name, parameter, temperature))
        place = match.end()
    if clean.endswith("+") and not clean.endswith("tvd++"):
        raise UserError(f"{named} ends in +; drop it, or add a term")
    return Loss(tuple(terms))


def _term(
    named: str,
    weight: str | None,
    name: str,
    parameter: str | None,
    temperature: str | None,
) -> Term:
    if name not in NAMES:
        hint = did_you_mean(name[:40], NAMES)
        if not hint:
            hint = f"choose {', '.join(NAMES)}"
        raise UserError(f"{named}: {shown(name)} is not a valid loss; {hint}")
    if parameter is not None and name not in _DEFAULTS:
        raise UserError(
            f"{named}: {name} takes no parameter; {' and '.join(_DEFAULTS)} do (js:0.5)"
        )

    def number(
        what: str,
        given: str | None,
        default: float,
        low: float,
        high: float,
    ) -> float:
        value = default if given is None else read_number(given)
        if value is None or (given is not None and not low <= value <= high):
            ends = ""
            if "beta" in what:
                ends = "; its ends are kl and reverse_kl"
            raise UserError(
                f"{named}: {what} is {shown(given)}, but must be a number from {low:g} to {high:g}{ends}"
            )
        return value

    if name == "js":
        what = "beta of js"
        high = 0.999
    else:
        what = f"the parameter of {name}"
        high = 1000.0
    chosen = number(what, parameter, _DEFAULTS.get(name, 0.0), 0.001, high)
    share = number("the weight", weight, 1.0, 1e-6, 1e6)
    return Term(
        name,
        share,
        chosen,
        number("the temperature", temperature, 1.0, 0.01, 100.0),
    )
