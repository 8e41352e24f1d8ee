"""From prompts to batches: prompts -> responses (or existing conversations) -> token store ->
loader.
"""
