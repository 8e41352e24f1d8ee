"""Muon for the matrices of a drafter's layers, AdamW for its other weights.

Muon (Jordan et al. 2024) steps a matrix by its momentum made orthogonal, so that all directions
learn alike. It is meant for hidden layers: embeddings, heads over a vocabulary, norms and biases
keep AdamW. Both share one learning rate, since Muon's steps are scaled to the size of AdamW's
(arXiv 2502.16982).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import TrainingArguments

from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.files import Json

NAME = "muon"  # value of a recipe's `optim`
NOT_CUT = "optim='muon' steps whole matrices, which DeepSpeed cuts; name Muon in DeepSpeed's own file, or launch without it"


class MuonAndAdamW(Optimizer):
    """One optimizer of both, with the parameter groups and the state of both.

    Args:
        matrices: parameter groups of [o, i] weights, which Muon steps.
        others: parameter groups for AdamW.
        args: learning rate, betas and epsilon.
    """

    def __init__(
        self,
        matrices: list[Json],
        others: list[Json],
        args: TrainingArguments,
    ):
        self._muon = Muon(
            matrices,
            lr=args.learning_rate,
            weight_decay=args.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adamw = AdamW(
            others,
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
        )
        # Schedules and checkpoints see one list of groups.
        groups = [*self._muon.param_groups, *self._adamw.param_groups]
        self._matrices = len(self._muon.param_groups)
        super().__init__(groups, {})
        self._share()

    def _share(self) -> None:
        """Lets both step these groups, and keep their momenta here, where checkpoints find them."""
        self._muon.param_groups = self.param_groups[: self._matrices]
        self._adamw.param_groups = self.param_groups[self._matrices :]
        for optimizer in (self._muon, self._adamw):
            optimizer.state = self.state

    def load_state_dict(self, state_dict: Json) -> None:
        super().load_state_dict(state_dict)
        self._share()  # the groups and the state are new objects

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Steps both. closure: always None; accelerate passes it."""
        self._muon.step()
        self._adamw.step()


def matrices_of(drafter: TrainableDrafter) -> set[Tensor]:
    """The trained weights of linear layers, but for heads, whose outputs are a vocabulary."""
    words = (len(drafter.kept_ids), drafter.config.vocab_size)
    found = set()
    # Embeddings are no linear layers.
    for module in drafter.modules():
        if not isinstance(module, nn.Linear) or module.out_features in words:
            continue
        if module.weight.requires_grad:
            found.add(module.weight)
    return found
