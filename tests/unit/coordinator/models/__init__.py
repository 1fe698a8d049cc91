"""Tests of `coordinator.models`: the catalog, the hub, the fit, and jobs."""
