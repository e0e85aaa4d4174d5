"""A plan and its schedule become training steps and a measured trace."""
