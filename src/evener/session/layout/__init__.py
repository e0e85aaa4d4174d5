"""Who holds what of the model under a plan, where it lies, and the wires between the holders."""
