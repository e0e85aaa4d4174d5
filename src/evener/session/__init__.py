"""The training loop: recipes, launching, and the library's front door."""
