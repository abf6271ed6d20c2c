"""reply-ids: noted when a row ends, used again when a prompt has been tokenized."""

from tools.patch_tree import Edit, after, before

AR = "mlx_vlm/generate/ar.py"
SERVER = "mlx_vlm/server/generation.py"

CORE = {"mlx_vlm_cacheplus/core/reply_ids.py": "mlx_vlm/generate/reply_ids.py"}

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
    after(
        SERVER,
        "            raw_inputs = self._preprocess_request(\n"
        "                prompt, images, audio, videos, **args.preprocessing_kwargs()\n"
        "            )\n",
        "            raw_inputs = respell_inputs(\n"
        "                self,\n"
        "                prompt,\n"
        "                raw_inputs,\n"
        "                (images, audio, videos),\n"
        "                args.tenant_id,\n"
        "            )\n",
        within="ResponseGenerator.generate",
    ),
]
