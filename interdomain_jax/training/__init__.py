"""Training: optimizer, state, step, loop, checkpoints and what a run reports."""
