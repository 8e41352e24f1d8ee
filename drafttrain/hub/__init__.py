"""Publishing drafters and data sets on the Hugging Face Hub, with cards made from measured results."""
