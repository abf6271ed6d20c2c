"""What upstream would own: imports mlx and mlx_vlm only, never the plugin.

Each module here becomes one file of a patch, byte for byte; the plugin and the
patch differ only in the call sites that lead into it.
"""
