"""Choose: fleet, profile and job become the best plan, with its proof and its reasons."""
