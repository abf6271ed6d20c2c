"""reply-ids: noted when a row ends, used again when a prompt has been tokenized."""

from tools.patch_tree import Edit, after, before

AR = "mlx_vlm/generate/ar.py"
SERVER = "mlx_vlm/server/generation.py"

CORE = {"mlx_vlm_cacheplus/core/reply_ids.py": "mlx_vlm/generate/reply_ids.py"}

# The same call in two methods.
TOKENIZED = (
    "raw_inputs = self._preprocess_request(\n"
    "{0}    prompt, images, audio, videos, **args.preprocessing_kwargs()\n"
    "{0})\n"
)
RESPELLED = "{0}raw_inputs = respell_inputs(\n{0}    self, prompt, raw_inputs, (images, audio, videos)\n{0})\n"

EDITS = [
    before(
        AR,
        "from .types import GenerateKwargs",
        "from .reply_ids import ending_rows, note_ended_rows\n",
    ),
    Edit(
        AR,
        "        commit_ended_rows(self, keep)\n",
        "        ending = ending_rows(self, keep)\n"
        "        commit_ended_rows(self, keep)\n"
        "        note_ended_rows(ending)\n",
        within="GenerationBatch.filter",
    ),
    before(
        SERVER,
        "from ..sample_utils import (",
        "from ..generate.reply_ids import respell_inputs\n",
    ),
    *(
        after(
            SERVER,
            TOKENIZED.format(" " * indent),
            RESPELLED.format(" " * indent),
            within=f"ResponseGenerator.{method}",
        )
        for method, indent in (("generate", 12), ("validate_context_budget", 8))
    ),
]
