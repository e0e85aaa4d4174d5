"""When to keep a plan and when to change it: what was measured → what is believed → a decision."""
