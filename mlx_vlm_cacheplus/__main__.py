"""``python -m mlx_vlm_cacheplus`` is the command of the same name."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
