"""Orders: who does what, in which order."""
