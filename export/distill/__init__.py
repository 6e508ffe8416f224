"""A draft distilled from its target: texts, the target's distributions over them, and the training."""
