"""volatile-lines: where messages become the text of a prompt."""

from tools.patch_tree import after, before

PROMPT = "mlx_vlm/prompt_utils.py"

CORE = {"mlx_vlm_cacheplus/core/volatile_lines.py": "mlx_vlm/volatile_lines.py"}

EDITS = [
    after(PROMPT, "import json\n", "import os\n"),
    after(
        PROMPT,
        "from typing import Any, Dict, List, Union\n",
        "\nfrom .volatile_lines import without_volatile_lines\n",
    ),
    before(
        PROMPT,
        "    try:\n        template_processor = None\n",
        "    messages = without_volatile_lines(\n"
        '        messages, os.environ.get("MLX_VLM_VOLATILE_LINES")\n'
        "    )\n"
        "\n",
        within="get_chat_template",
    ),
]
