"""The composition root of `mtp-coord serve`: joins API, generation loop, cluster and live status."""
