"""Verification: which draft tokens the target accepts.

The walk starts at the root. At each node the target chooses the next token. If a child carries that
token, the walk moves to the child; otherwise the token is the bonus token and ends the round.
Greedy: the choice is the argmax. Sampled: the choice is distributed as the target's p. Two rules
apply, depending on how the children were proposed.

Children chosen by a rule (the drafter's top tokens, an n-gram match): the choice is one draw from
p. This is speculative sampling with one-hot proposals (Leviathan et al. 2023, arXiv 2211.17192):
child x_i is accepted with probability p(x_i), and a token outside the children appears with its own
p(x). The rule consumes the same random numbers as plain decoding, so a seed gives the same text
with any such tree.

Children drawn from the drafter's q (`TokenTree.proposal`): multi-round rejection, see `try_drawn`.
With one child it accepts with probability sum_x min(p(x), q(x)); one draw from p would hit the
child only with sum_x p(x) q(x).

p is the distribution after the target's logits processors (generation_config). They read the text
before a token, which differs from node to node, so they run at the nodes that a walk reaches, each
with its own text.

A node may have both (a match merged into a sampled tree). The drawn children are tried first. If
all are rejected, the token is drawn from the residual of p and compared with the other children.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor

from drafttrain.batch import TokenTree, cat
from drafttrain.errors import UserError
from drafttrain.inference.rejection import Choice, choose
from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.sampling import Sampler, SamplingParams, argmax, sample
from drafttrain.target import Target
from drafttrain.target.generation import LogitsRules

# Most nodes (and roots) at which a GPU chooses before it is known which ones are visited.
_AHEAD = 64


@dataclass
class Verdict:
    """The outcome of a round.

    Attributes:
        path: accepted node indices, from the root down.
        tokens: committed tokens: those of the path and, unless the path ends in EOS, the bonus
            token.
        ended: whether the last token is EOS.
    """

    path: list[int]
    tokens: list[int]
    ended: bool


class ProcessedText:
    """The logits processors of a sequence, and the text that they read.

    The text is the prompt and every token chosen so far. Every node of a tree has a text of its
    own. A walk only descends, and what it takes is committed, so one buffer holds the text of the
    node that the walk has reached.

    Args:
        processors: transformers' objects, in the order in which they run.
        prompt: [L] int64, all tokens before the answer. limit: most tokens of the answer.
        alike: equal for texts whose processors compute the same from the logits alone; None if
            processors read the text.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        prompt: Tensor,
        limit: int,
        alike: object = None,
    ):
        self.processors = processors
        self.alike = alike
        self._ids = torch.cat((prompt, prompt.new_zeros(limit)))[None]  # [1, L + limit]
        self._length = len(prompt)

    @classmethod
    def of(
        cls,
        rules: LogitsRules,
        target: Target,
        prompt: Tensor,
        limit: int,
        eos_ids: Collection[int],
    ) -> ProcessedText | None:
        """The text of a sequence that ends with `eos_ids`; None without rules."""
        if not rules:
            return None
        processors = rules.processors(target.model, prompt, limit, eos_ids)
        alike = None if rules.reads_text else frozenset(eos_ids)
        return cls(processors, prompt, limit, alike)

    def add(self, token: int) -> None:
        """Appends a chosen token to the text."""
        self._ids[0, self._length] = token
        self._length += 1

    def process(self, logits: Tensor) -> Tensor:
        """The processed logits of the next token.

        Args:
            logits: [m, v] float32; one row if the processors read the text.
        """
        for processor in self.processors:
            logits = processor(self._ids[:, : self._length], logits)
        return logits


def texts_of(verifiers: Iterable[Verifier]) -> list[ProcessedText]:
    """The texts of sequences whose logits are processed; empty if none are."""
    return [verifier.text for verifier in verifiers if verifier.text is not None]


def processed(
    texts: Sequence[ProcessedText],
    logits: Tensor,
    sampling: SamplingParams,
) -> Tensor:
    """Logits [m, v] of the next token of each text, after its processors; unchanged without texts.

    Raises:
        UserError: sampling, and no token is left.
    """
    if not texts:
        return logits
    first = texts[0]
    if first.alike is not None and all(text.alike == first.alike for text in texts):
        logits = first.process(logits)
    else:  # row by row: lengths differ, and padding would be read as text
        rows = [text.process(row[None]) for text, row in zip(texts, logits, strict=True)]
        logits = torch.cat(rows)
    if not sampling.greedy and bool((logits.amax(-1) == -torch.inf).any()):
        raise UserError(
            "generation_config bans every token at some position; remove one of the keys that ban tokens"
        )
    return logits


class Verifier:
    """Verifies the rounds of one sequence, including the prefill's first token (an empty tree).

    Args:
        sampling: how the target chooses.
        eos_ids: tokens that end the sequence, also inside a path.
        generator: the sequence's own, on the CPU, so that its tokens do not depend on the rest of
            the batch.
        text: the logits processors with the text that they read; None without processors.
        uniforms: one number per token, for sequences without a drafter; they replace the generator.

    Attributes:
        sampler: for a drafter that samples its tokens; shares the generator.
        plain: greedy without processors, so the argmax of the logits decides.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        eos_ids: Collection[int],
        generator: torch.Generator,
        text: ProcessedText | None = None,
        uniforms: Iterator[float] | None = None,
    ):
        self.sampler = Sampler(sampling, generator)
        self.plain = sampling.greedy and text is None
        self.eos_ids = eos_ids
        self.text = text
        self.uniforms = uniforms


def verify_batch(
    verifiers: Sequence[Verifier],
    trees: Sequence[TokenTree],
    logits: Tensor,
    choices: Tensor | None = None,
) -> list[Verdict]:
    """Verifies the trees of many sequences in lockstep, one depth at a time.

    Args:
        verifiers: one per sequence, all with the same sampling.
        trees: one per sequence.
        logits: [N, v], each sequence's root and nodes in turn: N is the sum of len(tree) + 1.
        choices: [N] int64, argmax of the logits where it is already known.
    """
    sampling = verifiers[0].sampler.params
    plain = verifiers[0].plain
    assert all(verifier.sampler.params == sampling for verifier in verifiers)
    # Sequences with `uniforms` have no drafter, so all trees are empty.
    if verifiers[0].uniforms is not None and not sampling.greedy:
        return _sample_roots(verifiers, logits)

    walks: list[_Walk] = []
    start = 0  # of the tree's root among all roots and nodes
    for verifier, tree in zip(verifiers, trees, strict=True):
        walks.append(_Walk(verifier, tree, start))
        start += 1 + len(tree)
    # From a GPU, the choices at all nodes arrive in one transfer, with the tokens. On a CPU, take
    # the argmax of visited nodes only: most nodes of a tree are on no path.
    ahead = not plain and _draws_ahead(verifiers, logits)
    if ahead:
        everywhere: list[Choice] = []
        for walk in walks:
            everywhere += walk.choices_ahead()
        choices = choose(everywhere, logits, sampling)
    elif not plain:
        choices = None
    elif choices is None and not logits.is_cpu:
        choices = argmax(logits)
    parts = [tree.tokens for tree in trees if len(tree)]
    if choices is not None:
        parts.insert(0, choices)
    numbers: list[int] = []
    if parts:
        numbers = cat(parts).tolist()

    # The numbers are the choices, if any are known, then the tokens of all trees.
    begin = 0 if choices is None else len(logits)  # of the trees' tokens among the numbers
    for walk in walks:
        end = begin + len(walk.tree)
        walk.begin(numbers[begin:end])
        begin = end
    going = walks
    while going:
        # A walk at its root has node -1, which is row `start`.
        rows = [walk.start + 1 + walk.node for walk in going]
        if choices is not None:
            tokens = [numbers[row] for row in rows]
        elif plain:
            tokens = argmax_at(logits, rows)
        else:
            tokens = _choose_here(going, logits[rows], sampling)
        for walk, token in zip(going, tokens, strict=True):
            walk.take(token)
        going = [walk for walk in going if walk.going]
    if ahead:
        # The generators move on by the numbers that the walks have spent.
        # A path that ends in EOS chooses nothing at its last node.
        for walk in walks:
            visited = [-1, *walk.path][: len(walk.tokens)]
            walk.draw(sum(walk.spends(node) for node in visited))
    return [Verdict(walk.path, walk.tokens, walk.ended) for walk in walks]


def argmax_at(logits: Tensor, rows: Sequence[int]) -> list[int]:
    """Argmax of the given rows of logits [N, v]; on a CPU the other rows are not read."""
    readable = logits.is_cpu and logits.dtype == torch.float32 and logits.is_contiguous()
    kernels = cpu_kernels() if readable else None
    if kernels is None:
        return argmax(logits[rows]).tolist()
    count, v = logits.shape
    if not all(0 <= row < count for row in rows) or not v:
        raise ValueError(
            f"rows={list(rows)} must be from 0 to {count - 1}, of logits [{count}, {v}]"
        )
    begin = logits.data_ptr()
    token = ctypes.c_int64()
    value = ctypes.c_float()
    tokens = []
    for row in rows:
        at = begin + row * v * 4  # float32
        kernels.likeliest(at, 1, v, 1, ctypes.byref(token), ctypes.byref(value), None)
        tokens.append(token.value)
    return tokens


def next_tokens(
    verifiers: Sequence[Verifier],
    logits: Tensor,
    choices: Tensor | None = None,
) -> Tensor:
    """The next token of sequences without trees, without waiting for a device.

    Args:
        verifiers: greedy, or with `uniforms`, whose next number each one takes.
        logits: [b, v]. choices: [b] int64, argmax of the logits where it is already known.

    Returns:
        [b] int64 in memory of its own.
    """
    sampling = verifiers[0].sampler.params
    logits = processed(texts_of(verifiers), logits, sampling)
    if sampling.greedy:
        # The caller's choices may be a buffer that the next pass overwrites.
        return argmax(logits) if choices is None else choices.clone()
    numbers = [next(verifier.uniforms) for verifier in verifiers if verifier.uniforms is not None]
    uniforms = torch.tensor(numbers, dtype=torch.float64).to(logits.device, non_blocking=True)
    return sample(logits, sampling, uniforms)


def _sample_roots(verifiers: Sequence[Verifier], logits: Tensor) -> list[Verdict]:
    """The next token of sequences without trees, each by its next number of `uniforms`.

    Args:
        logits: [b, v].
    """
    tokens = next_tokens(verifiers, logits).tolist()
    for text, token in zip(texts_of(verifiers), tokens, strict=False):  # there may be no texts
        text.add(token)
    return [verdict_of(verifier, token) for verifier, token in zip(verifiers, tokens, strict=True)]


def verdict_of(verifier: Verifier, token: int) -> Verdict:
    """The verdict of a round without a tree."""
    return Verdict([], [token], token in verifier.eos_ids)


class _Walk:
    """The path of one sequence down its tree.

    Args:
        start: the root's index among all roots and nodes.

    Attributes:
        node: the node that the walk has reached, -1 at the root.
        children: the node of each (parent, token).
        drawn: by node (-1: the root), its children that were drawn from q, in that order.
    """

    def __init__(
        self,
        verifier: Verifier,
        tree: TokenTree,
        start: int,
    ):
        self.verifier = verifier
        self.tree = tree
        self.start = start
        self.drawn: dict[int, list[int]] = {}
        if tree.proposal is not None:
            for node, row in enumerate(tree.proposal.rows):
                if row >= 0:
                    self.drawn.setdefault(tree.parents[node], []).append(node)
        self.children: dict[tuple[int, int], int] = {}
        self.path: list[int] = []
        self.tokens: list[int] = []
        self.node = -1
        self.going = True
        self.ended = False

    def begin(self, drafted: list[int]) -> None:
        """Reads the tree's tokens."""
        # Probes are the last nodes: the target scores them, but no walk may take them.
        offered = len(self.tree) - self.tree.probes
        pairs = zip(self.tree.parents[:offered], drafted[:offered], strict=True)
        self.children = {key: node for node, key in enumerate(pairs)}

    def take(self, token: int) -> None:
        """Moves to the child with the target's token, or ends."""
        self.tokens.append(token)
        self.ended = token in self.verifier.eos_ids
        node = self.children.get((self.node, token))
        if node is not None:
            self.path.append(node)
            self.node = node
        self.going = node is not None and not self.ended

    def spends(self, node: int) -> int:
        """How many random numbers a visit of a node takes."""
        return 1 + len(self.drawn.get(node, ()))

    def draw(self, count: int) -> list[float]:
        """The sequence's next random numbers."""
        generator = self.verifier.sampler.generator
        return torch.rand(count, dtype=torch.float64, generator=generator).tolist()

    def choice(self) -> Choice:
        """The choice at the node that the walk has reached."""
        numbers = self.draw(self.spends(self.node))
        return Choice(self.tree, self.drawn.get(self.node, ()), numbers)

    def choices_ahead(self) -> list[Choice]:
        """The choice at the root and at every node, from the numbers that a walk would spend there.

        A node's numbers begin behind those of its ancestors. The generator's state stays.
        """
        begins = [0]  # of the root and each node
        for parent in self.tree.parents:  # parents precede their children; entry 0 is the root's
            begins.append(begins[parent + 1] + self.spends(parent))
        ends = [begin + self.spends(node) for node, begin in enumerate(begins, -1)]
        generator = self.verifier.sampler.generator
        state = generator.get_state()
        numbers = self.draw(max(ends))
        generator.set_state(state)
        made = []
        for node, (begin, end) in enumerate(zip(begins, ends, strict=True), -1):
            made.append(Choice(self.tree, self.drawn.get(node, ()), numbers[begin:end]))
        return made


def _draws_ahead(verifiers: Sequence[Verifier], logits: Tensor) -> bool:
    """Whether to choose at all nodes at once, on a GPU: a walk would wait for it at every node.

    Processors need the text of a walk, and many nodes are too much work for the few that walks
    visit.
    """
    return not logits.is_cpu and len(logits) <= _AHEAD and not texts_of(verifiers)


def _choose_here(
    walks: list[_Walk],
    logits: Tensor,
    sampling: SamplingParams,
) -> list[int]:
    """The next token of each walk; logits [m, v] at the nodes that the walks have reached."""
    texts = texts_of(walk.verifier for walk in walks)
    logits = processed(texts, logits, sampling)
    if sampling.greedy:
        tokens = argmax(logits)
    else:
        tokens = choose([walk.choice() for walk in walks], logits, sampling)
    numbers = tokens.tolist()
    # The tokens of a walk so far are the path that its next node adds to the text.
    for text, token in zip(texts, numbers, strict=False):
        text.add(token)
    return numbers
