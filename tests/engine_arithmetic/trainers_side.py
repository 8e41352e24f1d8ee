"""Trainers' own classes, on the CPU: heads that they write, and the logits that they compute. Imports nothing of ours.

    python trainers_side.py JOB.json

The job says wheels (folders of unpacked wheels, to be imported from), target (a folder), heads (name, kind, keys of its config,
and folder), answer (the file to write) and, once heads are written, inputs: features [t, f*h] of each head and tokens [t + 3].
First each head is written with random weights, as its trainer saves it. A second run reads them and answers the logits of two
depths, [2, d] per head: below the first t tokens, and below the token behind these.
"""

import json
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig, Qwen3Config

KEPT = 150  # tokens of a pruned vocabulary: the even ones


def shake(model):
    """Random weights, and norms that are not all ones; tables of the target stay."""
    made = torch.Generator().manual_seed(0)
    for name, value in model.named_parameters():
        if name.startswith(("embed_tokens", "lm_head", "verifier_")):
            continue
        if value.dim() == 1:
            value.data = 0.5 + torch.rand(value.shape, generator=made)
        else:
            value.data = torch.randn(value.shape, generator=made) * value.shape[-1] ** -0.5
    return model.float().eval()


def layer_config(target, kind, window):
    """The draft's layers as speculators 0.9 makes them of a target: its shapes, and a window in all of them."""
    theirs = AutoConfig.from_pretrained(target).to_dict()
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "rms_norm_eps", "max_position_embeddings", "hidden_act", "rope_parameters",
    )  # fmt: skip
    keys = {name: theirs[name] for name in names}
    types = {
        "sliding_window": 2048,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention"],
    }
    config = kind(
        num_hidden_layers=1, tie_word_embeddings=False, **keys, **(types if window else {})
    )
    config._attn_implementation = "eager"
    return config


class Speculators:
    """speculators 0.9: eagle3, peagle and mtp with the defaults of its command."""

    def make(self, job, head):
        import speculators.models.mtp.core  # noqa: F401
        from speculators import SpeculatorModel
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig

        name = head["kind"]
        model_class = {**SpeculatorModel.registry}[name]
        layers = Qwen3Config if name == "mtp" else LlamaConfig
        described = SpeculatorsConfig(
            algorithm=name,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=2)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(job["target"]),
        )
        config = model_class.config_class(
            transformer_layer_config=layer_config(job["target"], layers, name != "mtp"),
            speculators_config=described,
            **head["keys"],
        )
        model = model_class(config)
        if model.t2d is not None:
            d2t = torch.arange(KEPT)
            model.load_vocab_mappings(torch.arange(300) % 2 == 0, d2t)
        model.load_verifier_weights()
        shake(model).save_pretrained(head["folder"])

    def logits(self, job, head, features, tokens):
        from speculators import SpeculatorModel

        model = SpeculatorModel.from_pretrained(head["folder"]).float().eval()
        model.config.transformer_layer_config._attn_implementation = "eager"
        if head["kind"] != "mtp":
            from speculators.models.eagle3.core import create_float_mask

            # Saved configs name no attention, and FlexAttention was chosen when the class was made.
            model._attn_impl = "eager"
            model._create_mask_fn = create_float_mask
        t = len(features)
        if head["kind"] == "mtp":
            padded = torch.cat((features, torch.zeros(3, features.shape[1])))
            found, _, _ = model(tokens[None], padded[None])
            return torch.stack([each[0, t - 1] for each in found])
        rows = []
        model.lm_head.register_forward_hook(lambda _, __, out: rows.append(out[0]))
        read = tokens[1:]  # the token behind each state
        count = len(read)
        padded = torch.cat((features, torch.zeros(count - t, features.shape[1])))
        if head["kind"] == "eagle3":
            model(padded[None], read[None], torch.zeros(1, count, dtype=torch.long), ttt_steps=2)
            return torch.stack([out[t - 1] for out in rows])
        import speculators.models.peagle.core as core

        anchors = torch.tensor([*range(t), t - 1])
        depths = torch.tensor([0] * t + [1])
        core.generate_cod_sample_indices = lambda **_: (anchors, depths)
        core.compute_metrics = lambda **_: (None, None)
        last = torch.zeros(1, count, model.hidden_size)
        model(
            padded[None],
            read[None],
            torch.zeros(1, count, dtype=torch.long),
            verifier_last_hidden_states=last,
        )
        return rows[0][-2:]


class VerlSpeCo:
    """verl-SpeCo 0.1's dense heads."""

    def parts(self, kind):
        if kind == "eagle1":
            from verl_speco.models.eagle1.configuration_eagle1 import Eagle1Config as config
            from verl_speco.models.eagle1.modeling_eagle1 import LlamaForCausalLMEagle1 as model
        else:
            from verl_speco.models.peagle.configuration_peagle import PeagleConfig as config
            from verl_speco.models.peagle.modeling_peagle import LlamaForCausalLMPeagle as model
        return config, model

    def make(self, job, head):
        config, cls = self.parts(head["kind"])
        theirs = AutoConfig.from_pretrained(job["target"]).to_dict()
        for key in ("architectures", "model_type", "dtype", "transformers_version"):
            theirs.pop(key, None)
        made = config(**{**theirs, **head["keys"]})
        made.architectures = [cls.__name__]
        model = shake(cls(made))
        model.embed_tokens.weight.data = self.table(job)
        model.save_pretrained(head["folder"])

    def table(self, job):
        return load_file(Path(job["target"]) / "model.safetensors")["model.embed_tokens.weight"]

    def logits(self, job, head, features, tokens):
        _, cls = self.parts(head["kind"])
        model = cls.from_pretrained(head["folder"]).float().eval()
        t = len(features)
        if head["kind"] == "eagle1":
            rows = load_file(Path(job["target"]) / "model.safetensors")["lm_head.weight"]
            first = model(tokens[None, 1 : t + 1], features[None])[0]
            # The next depth reads the state that this one has made.
            more = torch.cat((features, first[-1:]))
            second = model(tokens[None, 1 : t + 2], more[None])[0]
            return torch.stack((first[-1], second[-1])) @ rows.T
        anchors = torch.tensor([*range(t), t - 1])
        depths = torch.tensor([0] * t + [1])
        mask = model.build_peagle_block_mask(anchors, depths, torch.tensor([t + 1]), t + 1)
        ids = torch.cat((tokens[1 : t + 1], torch.tensor([model.config.mask_token_id])))
        state = model.project_hidden_states(features)
        state = torch.cat((state, model.masked_projected_hidden()))
        out = model.forward_peagle(ids[None], state[None], (anchors + depths)[None], mask)
        return model.compute_logits(out)[0, -2:]


TRAINERS = {"speculators": Speculators(), "verl-SpeCo": VerlSpeCo()}


@torch.no_grad()
def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    for wheel in job["wheels"]:
        sys.path.append(wheel)
    # verl-SpeCo's package imports verl; its models need none of it.
    for wheel in job["wheels"]:
        for name in (
            "verl_speco",
            "verl_speco.models",
            "verl_speco.models.eagle",
            "verl_speco.models.eagle1",
            "verl_speco.models.peagle",
        ):
            package = types.ModuleType(name)
            package.__path__ = [str(Path(wheel, *name.split(".")))]
            sys.modules[name] = package
    found = []
    for number, head in enumerate(job["heads"]):
        trainer = TRAINERS[head["trainer"]]
        try:
            if "inputs" not in job:
                trainer.make(job, head)
                found.append({"error": ""})
                continue
            features = torch.tensor(job["inputs"]["features"][number])
            tokens = torch.tensor(job["inputs"]["tokens"][number])
            found.append(
                {"error": "", "logits": trainer.logits(job, head, features, tokens).tolist()}
            )
        except Exception as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
    Path(job["answer"]).write_text(json.dumps({"heads": found}))


if __name__ == "__main__":
    main()
