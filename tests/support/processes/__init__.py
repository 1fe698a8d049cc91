"""Real coordinators, workers, proxies and peers as processes."""
