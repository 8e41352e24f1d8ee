"""A chat template with tools, and a tokenizer that has it."""

from __future__ import annotations

from tests.conftest import make_tokenizer

# Reasoning, calls as JSON, tools and a switch; earlier reasoning is dropped.
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools ' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}{{ '<t>' + m.reasoning_content + '</t>' }}{% endif %}"
    "{{ m.content.split('</t>')[-1] if loop.index0 < ns.last else m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('<t></t>' if thinking is false else '') }}{% endif %}"
)


def tokenizer_with(template: str):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<t>", "</t>", "<call>"])
    tokenizer.chat_template = template
    return tokenizer
