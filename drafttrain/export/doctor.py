"""`drafttrain doctor`: what fits between a published head, its target and the engines, in one table."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.specifiers import SpecifierSet

from drafttrain.batch import Batch
from drafttrain.drafters import registry
from drafttrain.drafters.adapters import adapted, is_adapter
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.published_keys import entries
from drafttrain.errors import UserError, first_line
from drafttrain.evaluation.suites import load_suite, take_evenly
from drafttrain.export.agreement import measure
from drafttrain.export.doctor_checks import CHECKS, WRONG, Finding, Patient, rows_of
from drafttrain.export.import_drafter import checkpoint_folder, find_kind
from drafttrain.export.tiny_drafters import answered
from drafttrain.files import Json, value_of
from drafttrain.flags import load_target
from drafttrain.folders import asked_file
from drafttrain.formats.engines import ENGINES
from drafttrain.formats.public_names import write_clean_json
from drafttrain.formats.weights import read_config, read_weights
from drafttrain.inference import generate_batch
from drafttrain.outcome import command_line, conclude, fault, next_command
from drafttrain.plain_yaml import read_yaml
from drafttrain.reports.output import table_of, wide_console
from drafttrain.target import Target, load_shell, resolve_target
from drafttrain.values import MOST

_TABLE = Path(__file__).with_suffix(".yaml")
_TOKENS = 64  # of a text


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 0 if everything fits, else 1."""
    output = asked_file(args, "doctor")
    releases = releases_of(args.engine_version)
    table = read_yaml(_TABLE.read_text(encoding="utf-8"), _TABLE.name)
    try:
        patient = read_head(args)
        rows = [*rows_of(patient, table["rows"]), *bugs_met(patient, table["bugs"], releases)]
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"head={args.head!r} has values of another form ({first_line(error)}); get an intact copy"
        ) from error
    wide_console().print(table_of(Finding._fields, rows))
    status = 0
    for row in rows:
        if row.verdict == WRONG:
            fault(f"{row.check}: {row.evidence}")
            status = 1
    named = [row._asdict() for row in rows]
    found: Json = {"command": command_line(), "releases": releases, "rows": named}
    if output:
        write_clean_json(output, found)
    then = ""
    if status == 0:  # what does not fit is mended first
        then = next_command(
            "import",
            checkpoint=args.head,
            target=args.target,
            output=f"runs/{Path(args.head).name}",
            allow_pickle=args.allow_pickle,
            trust_remote_code=args.trust_remote_code,
        )
    conclude(found, [output] if output else [], then)
    return status


def releases_of(text: str) -> Json:
    """Release by engine: that of --engine-version, or the newest known ones of all."""
    name, _, release = text.rpartition("=")
    found = {}
    for engine in ENGINES.values():
        if not text or engine.name.lower() == (name or "vllm").lower():
            found[engine.name] = engine.of_release(release).release
    if not found:
        raise UserError(f"engine-version={text!r} names no engine; write for example sglang=0.5.23")
    return found


def read_head(args: argparse.Namespace) -> Patient:
    """The head as import reads it, with what it refuses, and its agreement with the target."""
    folder = checkpoint_folder(args.head, args.allow_pickle)
    is_adapted = is_adapter(folder)
    config = {}
    if not is_adapted:
        config = read_config(folder)
    shell = load_shell(args.target, trust_remote_code=args.trust_remote_code)
    target: Target = shell
    batch = None
    has_weights = any(Path(resolve_target(args.target)).glob("*.safetensors"))
    if args.texts and has_weights:
        target = load_target(args)
        batch = texts(args, target)
    elif args.texts:
        print(
            f"note: target={args.target!r} is not a folder with weights, so it writes no texts to "
            "compare with; download it and give its folder",
            file=sys.stderr,
        )
    patient = Patient(dict(entries(config)), target)
    patient.template = value_of(
        read_config(folder, "tokenizer_config.json", {}), "chat_template", ""
    )
    for path in folder.glob("chat_template.jinja"):
        patient.template = path.read_text(encoding="utf-8")
    try:
        if is_adapted:
            head: TrainableDrafter = adapted(folder, shell)
            patient.keys = dict(entries(head.config.to_dict()))
            patient.weights = head.state_dict()
        elif "drafter_kind" in config or (folder / registry.META_FILE).is_file():
            patient.kind = config.get("drafter_kind", "")
            patient.weights = read_weights(folder)
            head = registry.load_trained(str(folder))
        else:
            form = find_kind(folder)
            patient.kind = form.drafter_class.kind
            patient.weights = form.published_weights(folder, args.allow_pickle)
            head = form.read(folder, target.identity(), args.allow_pickle)
        patient.kind = head.kind
        patient.fields = vars(head.config)
        if head.feature_layers:
            TrainableDrafter.bind(head, target)
            if batch is not None and not CHECKS["mask token"](patient):
                patient.agreement = measure(head, target, batch)
    except UserError as error:
        # The words of a path say nothing about the head.
        patient.refusal = str(error).replace(repr(str(folder)), "the head")
    return patient


def texts(args: argparse.Namespace, target: Target) -> Batch:
    """Answers that the target writes, behind their prompts."""
    suite = load_suite(args.suite, args.chat_template_kwargs)
    questions = take_evenly(suite.questions, args.texts)
    prompts = []
    for question in questions:
        prompt = question.prompt(target.tokenizer)
        if len(prompt) + _TOKENS <= (target.max_positions or MOST):
            prompts.append(prompt)
    if not prompts:
        raise UserError(
            f"suite={args.suite!r} has no prompts that target {target.name!r} can read; "
            "give shorter ones, or --texts 0"
        )
    answers = generate_batch(target, None, prompts, max_new_tokens=_TOKENS)
    return answered(prompts, [answer.tokens for answer in answers]).to(target.device)


def bugs_met(patient: Patient, bugs: list[Json], releases: Json) -> Iterator[Finding]:
    """Rows of the known bugs that a head meets, in these releases of engines, or of its trainer."""
    keys = patient.keys
    mapped = len(patient.weights.get("d2t", ()))
    limit = patient.target.max_positions or 0
    layers = value_of(keys, "aux_hidden_state_layer_ids", [])
    facts = {
        "kind": patient.kind,
        "shorter_than_target": value_of(keys, "max_position_embeddings", limit) < limit,
        "names_last_layer": patient.target.num_layers in layers,
        "short_table": 0 < mapped < value_of(keys, "draft_vocab_size", 0),
        "pruned": mapped > 0,
    }
    facts = {**patient.fields, **patient.rope, **keys, **facts}
    for bug in bugs:
        project = bug["bug"].partition(" ")[0]
        release = releases.get(project, keys.get(f"{project}_version", ""))
        if project in ENGINES and project not in releases:
            continue
        affected = not release or SpecifierSet(bug.get("releases", "")).contains(release, True)
        meets = [re.search(bug["when"][key], str(facts.get(key))) for key in bug["when"]]
        if affected and all(meets):
            yield Finding(f"{bug['bug']} {release}".rstrip(), WRONG, bug["effect"], bug["fix"])
