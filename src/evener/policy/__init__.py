"""When: a trace and a membership become a decision and its reason."""
