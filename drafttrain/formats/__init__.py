"""Files of others: engines' names and tensors, safetensors, GGUF. Knows no drafter class."""
