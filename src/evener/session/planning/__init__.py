"""Before the first step: what is measured, and the plan that all devices agree on."""
