"""Scripts that run in the environments of other engines; they import nothing of ours."""
