"""Numbers: seconds, bytes and bounds of every action, from a profile and a fleet."""
