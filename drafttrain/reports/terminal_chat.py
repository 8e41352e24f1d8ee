"""`drafttrain chat`: a conversation in the terminal, whose tokens are shaded by who produced them.

`ChatSession` holds the conversation and answers; a view shows a turn while it grows: `LiveView` on
a terminal, `PlainView` in a pipe. Slash commands work in both.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from drafttrain.batch import TokenTree
from drafttrain.data.chat import NO_INPUTS, ChatInputs, Message, has_template
from drafttrain.data.image_parts import in_front, with_names
from drafttrain.data.image_prompts import chat_prompt
from drafttrain.drafters.combined import parts_of
from drafttrain.drafters.registry import chosen_tree, load_drafter
from drafttrain.environment import __version__
from drafttrain.errors import UserError
from drafttrain.files import Json, write_json
from drafttrain.flags import load_target, sampling_of
from drafttrain.folders import inputs_of, output_file
from drafttrain.images import Picture, read_picture
from drafttrain.inference import Decoder, Stats
from drafttrain.inference.sequence import TextStream
from drafttrain.inference.verify import Verdict
from drafttrain.progress import counted, plain_console
from drafttrain.target.sight import ImagePrompt

# What may be typed besides messages; the help of `drafttrain chat` lists it too.
COMMANDS = {
    "/plain": "switch drafting off, which decodes the last answer again to compare, and on again",
    "/image PATH": "show an image with the next message; again for several",
    "/system TEXT": "set the system message, or none",
    "/reset": "begin a new conversation",
    "/save FILE": "write the conversation and its figures as JSON",
    "/help": "show this list",
    "/quit": "end, as Ctrl-D does",
}
OWN = "target"  # the producer of tokens that no drafter proposed
# Of the drafter's tokens, and of the matches merged into its tree.
_STYLES = ("black on #93c5fd", "black on #fcd34d")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_REDRAW = 0.05  # seconds between two states of the live display


@dataclass
class ChatTurn:
    """A message, its answer so far, and the answer's record.

    Attributes:
        drafting: whether a drafter was asked. prompt: its token ids, or the prompt with images.
        pieces: (text, producer) of each token.
        images: shown with the message.
        plain: tokens and seconds of the same answer decoded without a drafter; zeros if unknown.
        shown: seconds between rounds, in which the answer was displayed. finish: as in `Stats`;
            `stopped` if Ctrl-C ended it.
    """

    user: str
    drafting: bool
    prompt: list[int] | ImagePrompt
    seed: int
    images: tuple[Picture, ...] = ()
    plain: tuple[int, float] = (0, 0.0)
    stats: Stats = field(default_factory=Stats)
    pieces: list[tuple[str, str]] = field(default_factory=list)
    shown: float = 0.0
    finish: str = ""

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def decoded(self) -> tuple[int, float]:
        """Tokens after the prefill's, and the seconds in which they were decoded."""
        seconds = self.stats.total_seconds - self.stats.prefill_seconds - self.shown
        return max(self.stats.new_tokens - 1, 0), max(seconds, 0.0)

    @property
    def producers(self) -> Counter[str]:
        """Number of tokens by producer."""
        return Counter(producer for _, producer in self.pieces)


def rate(counts: tuple[int, float]) -> float | None:
    """Tokens per second of (tokens, seconds); None where nothing was measured."""
    tokens, seconds = counts
    if tokens and seconds:
        return tokens / seconds
    return None


def printable(text: str) -> str:
    """Text for a terminal, to which a model must not write escape sequences."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _asked(text: str, images: Sequence[Picture]) -> Message:
    """A message of the user."""
    return in_front([{"role": "user", "content": text}], images)[0]


@dataclass
class ChatSession:
    """A conversation with a target, drafted for by a drafter.

    Args:
        drafted: the engine of its answers; one without a drafter decodes plainly.
        system: the system message; '' for none. inputs: what the chat template reads besides the
            messages.

    Attributes:
        drafting: whether the next answer is drafted. turns: what was answered since the last reset.
        images: to be shown with the next message.
    """

    drafted: Decoder
    max_new_tokens: int
    seed: int = 0
    system: str = ""
    inputs: ChatInputs = NO_INPUTS

    def __post_init__(self) -> None:
        drafted = self.drafted
        self.target = drafted.target
        self.undrafted = Decoder(
            drafted.target,
            None,
            spec=drafted.spec,
            sampling=drafted.sampling,
            keep=True,
        )
        self.names: list[str] = []  # the producers besides the target
        if drafted.drafter is not None:
            for part in parts_of(drafted.drafter):
                if part is not None:
                    self.names.append(part.kind)
        self.drafting = bool(self.names)
        self.turns: list[ChatTurn] = []
        self.images: list[Picture] = []

    @property
    def messages(self) -> list[Message]:
        """The conversation, system message first; images as pictures."""
        made: list[Message] = []
        if self.system:
            made.append({"role": "system", "content": self.system})
        for turn in self.turns:
            made.append(_asked(turn.user, turn.images))
            made.append({"role": "assistant", "content": turn.text})
        return made

    def answer(self, text: str) -> Generator[ChatTurn]:
        """Answers a message; yields the same turn after each round.

        The turn joins the conversation with its first token.

        Raises:
            UserError: a prompt that the chat template refuses or that the target's context does not
                hold.
        """
        messages = [*self.messages, _asked(text, self.images)]
        prompt = chat_prompt(self.target, messages, self.inputs)
        # Each turn draws random numbers of its own.
        seed = (self.seed + len(self.turns)) % 2**32
        turn = ChatTurn(text, self.drafting, prompt, seed, tuple(self.images))
        self.images = []
        for each in self._decode(turn, self.max_new_tokens):
            if not self.turns or self.turns[-1] is not turn:
                self.turns.append(turn)
            yield each

    def answer_again(self) -> Generator[ChatTurn]:
        """Decodes the last answer once more without a drafter, which measures its `plain`.

        Another text, as sampling may give, or a part of it measures nothing.
        """
        last = self.turns[-1]
        turn = ChatTurn(last.user, False, last.prompt, last.seed, last.images)
        yield from self._decode(turn, last.stats.new_tokens)
        if turn.text == last.text:
            last.plain = turn.decoded

    def _decode(self, turn: ChatTurn, limit: int) -> Generator[ChatTurn]:
        """Decodes an answer; yields its turn after each round."""
        stream = TextStream(self.target.tokenizer)
        producers = [OWN]  # of the tokens of a round; the prefill's is the target's

        def observe(_: int, tree: TokenTree, verdict: Verdict, *__: object) -> None:
            producers.clear()
            for node in verdict.path:
                producer = self.names[0]
                if node in tree.matched and len(self.names) > 1:
                    producer = self.names[1]
                producers.append(producer)
            producers.append(OWN)

        decoder = self.undrafted
        if turn.drafting:
            decoder = self.drafted
            decoder.observer = observe
        rounds = decoder.stream(
            [turn.prompt], max_new_tokens=limit, seed=turn.seed, stats=[turn.stats]
        )
        try:
            for _, tokens in rounds:
                began = time.perf_counter()
                turn.finish = turn.stats.finish
                # Fewer tokens than producers where a limit or an end of sequence cut the round.
                for number, (token, producer) in enumerate(zip(tokens, producers, strict=False), 1):
                    stream.push([token])
                    is_last = number == len(tokens) and turn.finish != ""
                    turn.pieces.append((stream.take(last=is_last), producer))
                yield turn
                if not turn.finish:  # the last token ends the clock of decoding, before it is shown
                    turn.shown += time.perf_counter() - began
        finally:
            rounds.close()
            if not turn.finish:
                turn.finish = "stopped"
            if not turn.drafting:
                turn.plain = turn.decoded

    def record(self, turn: ChatTurn) -> Json:
        """A turn as --json prints and /save writes it."""
        stats = turn.stats
        shown: Json = {}
        if turn.images:
            shown["images"] = [picture.name for picture in turn.images]
        return {
            "user": turn.user,
            **shown,
            "answer": turn.text,
            "finish": turn.finish,
            "drafting": turn.drafting,
            "prompt_tokens": stats.prompt_tokens,
            "tokens": stats.new_tokens,
            "producers": dict(turn.producers),
            "accepted_length": stats.accepted_length,
            "tokens_per_second": rate(turn.decoded),
            "plain_tokens_per_second": rate(turn.plain),
        }

    def figures(self, turn: ChatTurn) -> str:
        """A turn's figures in one line."""
        stats = turn.stats
        own = rate(turn.decoded)
        plain = rate(turn.plain)
        parts = [f"{stats.new_tokens} tokens"]
        if own:
            parts.append(f"{own:.1f} tokens/s")
        if turn.drafting:
            if stats.target_passes:
                parts.append(f"accepted length {stats.accepted_length:.2f}")
            counts = turn.producers
            shares = []
            for name in (*self.names, OWN):
                shares.append(f"{name} {counts[name] / counts.total():.0%}")
            parts.append(", ".join(shares))
            if plain is None:
                parts.append("plain: /plain measures it")
            elif own:
                parts.append(f"plain {plain:.1f} tokens/s ({own / plain:.2f}x)")
        else:
            parts.append("plain decoding")
        if turn.finish == "stopped":
            parts.append("stopped")
        elif turn.finish == "length" and stats.new_tokens < self.max_new_tokens:
            parts.append("the target's context is full: /reset")
        elif turn.finish == "length":
            parts.append("cut by --max-new-tokens")
        return " | ".join(parts)


@dataclass
class PlainView:
    """Answers without colors, for pipes: text or JSON on stdout, everything else on stderr.

    Attributes:
        stop: whether this answer ends after its round; None between answers.
    """

    session: ChatSession
    as_json: bool = False
    stop: bool | None = field(default=None, init=False)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """The handler of Ctrl-C on a terminal, which stops an answer.

        A second one, or one at the prompt, is an exception.
        """
        if self.stop is not False:
            raise KeyboardInterrupt
        self.stop = True

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def answer(self, text: str) -> None:
        """Answers and shows a message."""
        done = 0
        with contextlib.closing(self.session.answer(text)) as rounds:
            for turn in rounds:
                if not self.as_json:
                    piece = turn.text[done:]
                    done = len(turn.text)
                    if sys.stdout.isatty():
                        piece = printable(piece)
                    print(piece, end="", flush=True)
                if self.stop:
                    break
        if self.as_json:
            print(json.dumps(self.session.record(turn), ensure_ascii=False), flush=True)
        else:
            print(flush=True)
            self.say(self.session.figures(turn))

    def compare(self) -> None:
        """Measures plain decoding of the last answer, if it was drafted, and shows the ratio."""
        turns = self.session.turns
        if not turns or not turns[-1].drafting:
            return
        self.stop = False
        try:
            with contextlib.closing(self.session.answer_again()) as rounds:
                for _ in rounds:
                    if self.stop:
                        break
        finally:
            self.stop = None
        if rate(turns[-1].plain) is None:
            self.say("no ratio: plain decoding was stopped, or sampled another text")
        else:
            self.say(f"the last answer: {self.session.figures(turns[-1])}")


class LiveView(PlainView):
    """Answers on a terminal.

    Complete rows scroll away; rich redraws the last row and the figures below them.
    """

    def __init__(self, session: ChatSession, console: Console):
        super().__init__(session)
        self.console = console
        self.styles = dict(zip(session.names, _STYLES, strict=False))

    def say(self, text: str) -> None:
        self.console.print(text, style="dim")

    def answer(self, text: str) -> None:
        console = self.console
        row = Text()
        done = 0
        drawn = 0.0
        live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            vertical_overflow="visible",
        )
        with live, contextlib.closing(self.session.answer(text)) as rounds:
            for turn in rounds:
                for piece, producer in turn.pieces[done:]:
                    row.append(printable(piece), self.styles.get(producer))
                done = len(turn.pieces)

                rows = list(row.wrap(console, console.width))  # splits at line ends too
                if rows:
                    if row.plain.endswith(" ") and not rows[-1].plain.endswith(" "):
                        rows[-1].append(" ")  # was dropped at the right margin
                    row = rows.pop()
                if rows:
                    console.print(Group(*rows))
                if rows or time.monotonic() - drawn > _REDRAW:
                    figures = Text(
                        self.session.figures(turn),
                        "dim",
                        no_wrap=True,
                        overflow="ellipsis",
                    )
                    live.update(Group(row.copy(), figures), refresh=True)
                    drawn = time.monotonic()
                if self.stop:
                    break
        console.print(row)
        self.say(self.session.figures(turn))


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        UserError: values out of range, or anything that cannot be loaded.
    """
    sampling = sampling_of(args)
    spec = chosen_tree(args.tree, args.drafter)
    spec.check(sampling)
    target = load_target(args)
    if target.tokenizer is None:
        raise UserError(
            f"target={args.target!r} has no tokenizer, which a chat needs; "
            "add its files to the folder"
        )
    drafter = load_drafter(args.drafter, target)
    decoder = Decoder(
        target.pack(),
        drafter,
        spec=spec,
        sampling=sampling,
        keep=True,
    )
    session = ChatSession(
        decoder,
        args.max_new_tokens,
        seed=args.seed,
        system=args.system,
        inputs=ChatInputs((), args.chat_template_kwargs),
    )

    # A terminal shows colors and a line about what to type.
    console = plain_console()
    typed = sys.stdin.isatty()
    view = PlainView(session, args.json)
    if typed and console.is_terminal and not args.json and not console.is_dumb_terminal:
        live = LiveView(session, console)
        live.say(
            f"{args.target} answers. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends."
        )
        shades = [Text(f" {name} ", style) for name, style in live.styles.items()]
        console.print(Text("  ").join([*shades, Text("the target's own")]))
        view = live
    if not has_template(target.tokenizer):
        view.say(f"{args.target} has no chat template: it continues the conversation as a document")
    if drafter is not None and str(spec) == "none":
        asked = "--tree none" if args.tree else "the drafter's tuned tree is none"
        view.say(f"{asked}: nothing is drafted; --tree chain:3 drafts all the same")

    if isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes that are not UTF-8 must not end the chat.
        sys.stdin.reconfigure(errors="replace")
    if not typed:
        for line in sys.stdin:
            if line.strip() and not respond(view, line.rstrip("\r\n"), args):
                break
        return 0
    before = signal.signal(signal.SIGINT, view.interrupt)
    try:
        for line in typed_lines(view):
            try:
                if line.strip() and not respond(view, line, args):
                    break
            except UserError as error:
                view.say(f"error: {error}")
    finally:
        signal.signal(signal.SIGINT, before)
    return 0


def respond(view: PlainView, line: str, args: argparse.Namespace) -> bool:
    """Runs a slash command or answers a message; False ends the conversation. Raises UserError."""
    session = view.session
    found = re.fullmatch(r"(/[a-z]+)(?:\s+(.*))?", line, re.DOTALL)
    if not found:
        view.stop = False
        try:
            view.answer(line)
        finally:
            view.stop = None
        return True

    name = found[1]
    rest = (found[2] or "").strip()
    if name == "/quit":
        return False
    if name == "/help":
        view.say("\n".join(f"{command:<15} {meaning}" for command, meaning in COMMANDS.items()))
    elif name == "/reset":
        session.turns = []
        session.images = []
        view.say("a new conversation")
    elif name == "/image":
        if not rest:
            raise UserError("/image: give the path of an image")
        assert session.target.processor is not None  # refused here, not with the next message
        session.images.append(read_picture(rest))
        view.say(f"the next message shows {counted(len(session.images), 'images')}")
    elif name == "/system":
        session.system = rest
        view.say("the system message is set" if rest else "no system message")
    elif name == "/plain":
        if not session.names:
            raise UserError("/plain: there is no drafter to switch off; start again with --drafter")
        session.drafting = not session.drafting
        if session.drafting:
            view.say("drafting is on")
        else:
            view.say("drafting is off: answers measure plain decoding")
            view.compare()
    elif name == "/save":
        path = output_file(rest, "chat", inputs_of(args, "system"), key="save")
        decoding = {
            "tree": str(session.drafted.spec),
            "temperature": args.temperature,
            "seed": args.seed,
        }
        saved = {
            "drafttrain": __version__,
            "target": args.target,
            "drafter": args.drafter,
            "decoding": decoding,
            "messages": with_names(session.messages),
            "turns": [session.record(turn) for turn in session.turns],
        }
        write_json(path, saved)
        view.say(f"wrote {rest}")
    else:
        known = ", ".join(command.split()[0] for command in COMMANDS)
        raise UserError(
            f"{name} is not one of {known}; a leading space sends the line as a message"
        )
    return True


def typed_lines(view: PlainView) -> Iterator[str]:
    """Lines from the terminal until Ctrl-D, edited with readline where there is one.

    Ctrl-C drops the line.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() then edits lines and remembers them
    prompt = "> " if isinstance(view, LiveView) else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            view.say("\nCtrl-D or /quit ends the conversation")
            continue
        yield line
