"""drafttrain: train, prove and publish drafters for lossless speculative decoding."""

__version__ = "0.1.0"
