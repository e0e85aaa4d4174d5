"""Hardware becomes a fleet file."""
