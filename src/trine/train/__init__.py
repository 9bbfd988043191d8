"""Training: plan, optimizers, checkpoints and the loop. Importing this package loads no framework."""
