"""Membership, health and the choice of a plan: pure state and decisions, executed by the manager."""
