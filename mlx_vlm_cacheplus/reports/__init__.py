"""The reuse record: for each request, what was restored, what was read, and what the cache kept. See docs/REPORT.md."""
