"""The steps of a job on one device, and what happens in them and between two of them."""
