"""Pictures for requests: random, and always the same for a seed."""

from __future__ import annotations

import importlib

from tests.fakes.server import user


def picture(seed, size=64):
    """A data URL of a random picture, always the same for a seed."""
    import base64
    import io
    import random

    image = importlib.import_module("PIL.Image")
    noise = random.Random(seed).randbytes(size * size * 3)
    out = io.BytesIO()
    image.frombytes("RGB", (size, size), noise).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def look(*pictures, text="what is this"):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    return user([*parts, {"type": "text", "text": text}])
