"""The web page of the coordinator: static assets, and the event stream that keeps them up to date."""
