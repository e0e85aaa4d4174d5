"""A model becomes a profile file."""
