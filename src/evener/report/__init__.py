"""Tell: a plan and traces as text, JSON and HTML."""
