"""Builds the tiny models that the tests and the demo run on."""
