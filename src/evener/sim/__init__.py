"""What if: a schedule with costs and faults becomes a predicted trace."""
