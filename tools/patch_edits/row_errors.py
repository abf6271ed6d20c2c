"""row-errors: the generator settles whose an error is, the server fails that row."""

from tools.patch_tree import Edit, after, before

AR = "mlx_vlm/generate/ar.py"
SERVER = "mlx_vlm/server/generation.py"
APP = "mlx_vlm/server/app.py"

CORE = {
    "mlx_vlm_cacheplus/core/row_errors.py": "mlx_vlm/generate/row_errors.py",
    "mlx_vlm_cacheplus/core/hang_ups.py": "mlx_vlm/server/hang_ups.py",
}

EDITS = [
    before(
        AR,
        "from .types import GenerateKwargs",
        "from .row_errors import (\n"
        "    decode_recorded,\n"
        "    extend_recorded,\n"
        "    guard_queued,\n"
        "    next_isolated,\n"
        ")\n",
    ),
    before(
        AR,
        "        return uids\n",
        "        guard_queued(self, uids)\n",
        within="BatchGenerator.insert",
    ),
    Edit(
        AR,
        "generation_responses = self._generation_batch.next()",
        "generation_responses = decode_recorded(\n"
        "                self._generation_batch, self._generation_batch.next\n"
        "            )",
        within="BatchGenerator._next",
    ),
    Edit(
        AR,
        "            self._generation_batch.extend(gen_batch)\n",
        "            batch = self._generation_batch\n"
        "            extend_recorded(batch, functools.partial(batch.extend, gen_batch))\n",
        within="BatchGenerator._extend_generation_batch",
    ),
    Edit(
        AR,
        "return self._next(**kwargs)",
        "return next_isolated(self, functools.partial(self._next, **kwargs))",
        within="BatchGenerator.next",
    ),
    before(SERVER, "from queue import Empty", "from functools import partial\n"),
    before(
        SERVER,
        "from ..sample_utils import (",
        "from ..generate.row_errors import step_and_fail_rows, stream_text\n",
    ),
    before(
        SERVER,
        "from .runtime import runtime\n",
        "from .hang_ups import RowUid, belongs_to_request, own_cancels\n",
    ),
    Edit(
        SERVER,
        "                    input_ids, gen_kwargs = self._gpu_embed(\n"
        "                        raw_inputs,\n"
        "                        images,\n"
        "                        apc_semantic_hash=request.apc_semantic_hash,\n"
        "                    )\n",
        "                    try:\n"
        "                        input_ids, gen_kwargs = self._gpu_embed(\n"
        "                            raw_inputs,\n"
        "                            images,\n"
        "                            apc_semantic_hash=request.apc_semantic_hash,\n"
        "                        )\n"
        "                    except Exception as e:\n"
        '                        logger.exception("A request could not be embedded")\n'
        "                        _notify_queues([rqueue], e, None)\n"
        "                        continue\n",
    ),
    Edit(
        SERVER,
        "        self._uid = uid\n",
        "        self._uid = RowUid.of(uid, rqueue)\n",
        within="_TokenIterator.__init__",
    ),
    after(
        SERVER,
        "        self._lock = Lock()\n",
        "        belongs_to_request(self)\n",
        within="_TokenIterator.__init__",
    ),
    Edit(
        SERVER,
        "            return pending\n",
        "        return own_cancels(self, pending)\n",
        within="ResponseGenerator._drain_cancellations",
    ),
    after(
        SERVER,
        '        """One batch generation step: prefill + decode."""\n',
        "        step_and_fail_rows(\n"
        "            self,\n"
        "            batch_gen,\n"
        "            active,\n"
        "            partial(self._step_rows, batch_gen, active, gen_kwargs),\n"
        "        )\n"
        "\n"
        "    def _step_rows(self, batch_gen, active, gen_kwargs=None):\n",
        within="ResponseGenerator._step",
    ),
    Edit(
        SERVER,
        'return info["streamer"].advance(token, finish_reason)',
        "return stream_text(\n"
        '            self, info, partial(info["streamer"].advance, token, finish_reason)\n'
        "        )",
    ),
    before(
        APP,
        "from .model_discovery import",
        "from .hang_ups import RepliesEndWithTheirRequest\n",
    ),
    before(
        APP,
        "MAX_IMAGES = 10",
        "app.add_middleware(RepliesEndWithTheirRequest)\n\n",
    ),
]
