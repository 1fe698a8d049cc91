"""The composition root of `mtp-coord serve`, which joins API, generation loop, cluster and live status."""
