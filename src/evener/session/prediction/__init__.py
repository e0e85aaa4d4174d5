"""Outputs for a dataset through any plan: `ev.predict`, `evener predict`."""
