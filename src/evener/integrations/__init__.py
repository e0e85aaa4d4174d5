"""Other libraries' front doors."""
