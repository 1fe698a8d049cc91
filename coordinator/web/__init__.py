"""HTTP: the parts of an app, access, bodies, errors, the models of this machine, and the web page."""
