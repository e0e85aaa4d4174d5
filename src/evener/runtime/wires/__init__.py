"""Sums over groups of devices: inside each, between them by lanes, and back."""
