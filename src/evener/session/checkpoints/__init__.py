"""What a run leaves and takes up again: its state between two steps, and when that is saved."""
