"""Public fakes for tests."""
