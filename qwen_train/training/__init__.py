"""A run, from its checks to its last step: loss, optimizers, checkpoints, validation, report."""
