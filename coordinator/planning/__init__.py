"""The choice of a plan: cuts, costs and capacities. Plain data."""
