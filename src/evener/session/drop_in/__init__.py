"""A training loop of the user's own on unequal devices: `ev.prepare` and its checkpoints."""
