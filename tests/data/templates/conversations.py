"""Conversations of the shapes that reasoning and tool-using models produce, in OpenAI's form; no family's format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


def function(name: str, description: str, **kinds: str) -> Message:
    """A tool as JSON schema. kinds: type of each argument; all are required."""
    properties = {key: {"type": kind, "description": key} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(kinds)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [
    function("get_weather", "Weather of a place.", city="string", days="integer"),
    function("convert", "Converts an amount of money.", amount="number", to="string"),
]


def answer(content: str, reasoning: str = "", *calls: Message, cut: bool = False) -> Message:
    """What the target writes. cut: the limit ended it inside the reasoning, so there is no content."""
    message: Message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "cut": cut,
    }
    return message | ({"tool_calls": list(calls)} if calls else {})


def call(key: str, name: str, **arguments: object) -> Message:
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(key: str, name: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": key, "name": name, "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


@dataclass(frozen=True, eq=False)
class Case:
    """A conversation with the target's answers in it.

    Attributes:
        thinking: whether the template is asked to let the target reason. calls: most calls in a turn.
    """

    name: str
    messages: list[Message]
    tools: list[Message] = field(default_factory=list)
    thinking: bool = True

    @property
    def calls(self) -> int:
        return max(len(message.get("tool_calls", [])) for message in self.messages)


CASES = [
    Case(
        "system",
        [
            system("You answer in one sentence.\nNever lie."),
            user("Why is the sky blue?"),
            answer(
                "Air scatters blue light most.", "Rayleigh scattering.\n\nShort waves scatter more."
            ),
            user("And at dusk?"),
            answer(
                "The light's way through air is longer, so **red** is left.", "The same idea again."
            ),
        ],
    ),
    Case(
        "tools",
        [
            system("You are an agent."),
            user("Will it rain in Zürich?"),
            answer(
                "",
                "I must look: get_weather.",
                call("functions.get_weather:0", "get_weather", city="Zürich", days=2),
            ),
            result("functions.get_weather:0", "get_weather", '{"rain": [0.1, 0.9]}'),
            answer("Not today; tomorrow yes.", "0.9 is the second day."),
            user("What are 12.5 dollars in francs?"),
            answer(
                "",
                "convert does it.",
                call("functions.convert:1", "convert", amount=12.5, to="CHF"),
            ),
            result("functions.convert:1", "convert", "11.2"),
            answer("11.2 francs."),
        ],
        TOOLS,
    ),
    Case(
        "parallel calls",
        [
            user("Weather in Rome and Oslo?"),
            answer(
                "I ask for both.",
                "Two calls at once.",
                call("functions.get_weather:0", "get_weather", city="Rome", days=1),
                call("functions.get_weather:1", "get_weather", city="Oslo", days=1),
            ),
            result("functions.get_weather:0", "get_weather", "sun"),
            result("functions.get_weather:1", "get_weather", "snow"),
            answer("Rome: sun. Oslo: snow.", "Both came back."),
        ],
        TOOLS,
    ),
    Case(
        "empty reasoning",
        [user("Say hi."), answer("Hi!"), user("Again, with a bang."), answer("Hi!!\n\n\tBang.")],
    ),
    Case(
        "truncated reasoning",
        [
            user("What is 17 * 23?"),
            answer("391", "17 * 23 = 17 * 20 + 17 * 3"),
            user("Prove that there are infinitely many primes."),
            answer("", "Suppose there were finitely many, p1 to pn. Then", cut=True),
        ],
    ),
    Case(
        "thinking off",
        [
            system("Be brief."),
            user("Rain in Rome?"),
            answer("", "", call("functions.get_weather:0", "get_weather", city="Rome", days=1)),
            result("functions.get_weather:0", "get_weather", "none"),
            answer("No."),
            user("Thanks."),
            answer("You are welcome."),
        ],
        TOOLS,
        thinking=False,
    ),
]
