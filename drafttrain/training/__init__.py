"""Training: the loop, its step, and what they read, log and save."""
