"""The journal of stored answers: an SQLite database behind a thread, off the path of the tokens."""
