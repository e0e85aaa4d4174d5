"""State in unequal parts: each device keeps its part of optimiser state, gradients and parameters."""
