"""Getting models from, and bringing drafters to, where people keep them: fetch, export formats, model card, push."""
