"""Upstream's own tests as a second opinion: what is ours of it. See docs/UPSTREAM_TESTS.md."""
