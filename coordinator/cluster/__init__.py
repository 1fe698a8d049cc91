"""Membership, health and the choice of a plan: pure state and decisions, with effects in the manager."""
