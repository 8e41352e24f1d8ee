"""Data: prompts -> the target's answers -> stored tokens -> training batches.

sources.py, magpie.py        sources of prompts by name; prompts that the target writes itself
row_formats.py, filters.py   formats of published rows; which prompts are kept
generate.py                  `drafttrain generate`: asks for the answers, skips those stored already
servers.py                   requests to servers: addresses, the key, bounded replies
backends.py                  who answers: this process or a server; also vllm_, existing_backend.py
chat.py, template_bounds.py  the chat template: the only file that applies it; bounds on its work
conversation.py              turns of a conversation as tokens, each with its origin
transcript.py, masks.py      a row while it grows; spans that the assistant wrote
answers.py, tool_formats.py  reasoning and tool calls in answers; one form for tools
store.py, record_cache.py    the data set on disk: writing, reading, resuming; memory-mapped rows
loader.py                    training rows, kept vocabulary, packing into batches
"""
