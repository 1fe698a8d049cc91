"""Tests of plain data, without threads or sockets."""
