"""How far a run ends from plain loops on one device: `ev.verify`, `evener verify`, and those loops."""
