"""durable-disk: opened with the model, asked when rows are queued, closed with the manager."""

from tools.patch_tree import AnyEdit, Body, Cut, Edit, after, before

AR = "mlx_vlm/generate/ar.py"
APC = "mlx_vlm/apc.py"
APP = "mlx_vlm/server/app.py"
SERVER = "mlx_vlm/server/generation.py"

CORE = {
    "mlx_vlm_cacheplus/core/disk_folder.py": "mlx_vlm/disk_folder.py",
    "mlx_vlm_cacheplus/core/disk_index.py": "mlx_vlm/disk_index.py",
    "mlx_vlm_cacheplus/core/disk_plan.py": "mlx_vlm/disk_plan.py",
    "mlx_vlm_cacheplus/core/disk_ahead.py": "mlx_vlm/disk_ahead.py",
    "mlx_vlm_cacheplus/core/disk_eviction.py": "mlx_vlm/disk_eviction.py",
    "mlx_vlm_cacheplus/core/disk_replies.py": "mlx_vlm/disk_replies.py",
    "mlx_vlm_cacheplus/core/disk_files.py": "mlx_vlm/disk_files.py",
    "mlx_vlm_cacheplus/core/disk_settings.py": "mlx_vlm/disk_settings.py",
    "mlx_vlm_cacheplus/core/disk_policy.py": "mlx_vlm/disk_policy.py",
    "mlx_vlm_cacheplus/core/disk_store.py": "mlx_vlm/disk_store.py",
    "mlx_vlm_cacheplus/core/disk_summary.py": "mlx_vlm/disk_summary.py",
    "mlx_vlm_cacheplus/core/disk_identity.py": "mlx_vlm/disk_identity.py",
    "mlx_vlm_cacheplus/core/disk_safetensors.py": "mlx_vlm/disk_safetensors.py",
    "mlx_vlm_cacheplus/core/disk_sections.py": "mlx_vlm/disk_sections.py",
    "mlx_vlm_cacheplus/core/disk_segment.py": "mlx_vlm/disk_segment.py",
    "mlx_vlm_cacheplus/core/disk_arrays.py": "mlx_vlm/disk_arrays.py",
    "mlx_vlm_cacheplus/core/disk_format.py": "mlx_vlm/disk_format.py",
    "mlx_vlm_cacheplus/core/disk_sync.py": "mlx_vlm/disk_sync.py",
    "mlx_vlm_cacheplus/core/disk_parcel.py": "mlx_vlm/disk_parcel.py",
    "mlx_vlm_cacheplus/core/disk_writer.py": "mlx_vlm/disk_writer.py",
    "mlx_vlm_cacheplus/core/disk_reader.py": "mlx_vlm/disk_reader.py",
    "mlx_vlm_cacheplus/core/disk_companions.py": "mlx_vlm/disk_companions.py",
    "mlx_vlm_cacheplus/core/disk_spill.py": "mlx_vlm/disk_spill.py",
    "mlx_vlm_cacheplus/core/disk_intake.py": "mlx_vlm/disk_intake.py",
    "mlx_vlm_cacheplus/core/disk_tier.py": "mlx_vlm/disk_tier.py",
    "mlx_vlm_cacheplus/core/disk_coordination.py": "mlx_vlm/disk_coordination.py",
}

EDITS: list[AnyEdit] = [
    # The manager.
    Edit(
        APC,
        "        return {**snap, **self.segments.statistics()}\n",
        "        from .disk_coordination import statistics\n"
        "\n"
        "        return {**snap, **self.segments.statistics(), **statistics(self)}\n",
        within="APCManager.stats_snapshot",
    ),
    Body(
        APC,
        "APCManager.close",
        '    """Write what waits for the disk, and let its folder go."""\n'
        "    from .disk_coordination import close\n"
        "\n"
        "    close(self)\n",
    ),
    Cut(
        APC,
        "    disk_enabled = str(\n",
        "    logger.info(\n",
        "    from .disk_settings import settings_of\n"
        "\n"
        "    manager = APCManager(overrides=overrides)\n"
        "    manager.disk_settings = settings_of(overrides)\n",
        within="from_env",
    ),
    # The generator.
    before(AR, "from .. import draft_state\n", "from .. import disk_coordination\n"),
    Edit(
        AR,
        "        return take_turns(self, functools.partial(self._advance, **kwargs))\n",
        "        with disk_coordination.rows_being_read_wait(self):\n"
        "            return take_turns(\n"
        "                self, functools.partial(self._advance, **kwargs)\n"
        "            )\n",
        within="BatchGenerator.next",
    ),
    after(
        AR,
        "        guard_queued(self, uids)\n",
        "        disk_coordination.ask_ahead(self, uids)\n",
        within="BatchGenerator.insert",
    ),
    Edit(
        AR,
        "        with draft_state.offered_while_read(self):\n"
        "            try:\n"
        "                return self._prompt_step()\n",
        "        reading = disk_coordination.reading_prompt(self)\n"
        "        with reading, draft_state.offered_while_read(self):\n"
        "            try:\n"
        "                return self._prompt_step()\n",
        within="PromptProcessingBatch.prompt_step",
    ),
    Edit(
        AR,
        "        with draft_state.offered_while_read(self):\n"
        "            batch = self._generate(\n",
        "        reading = disk_coordination.reading_prompt(self)\n"
        "        with reading, draft_state.offered_while_read(self):\n"
        "            batch = self._generate(\n",
        within="PromptProcessingBatch.generate",
    ),
    # The server.
    after(
        SERVER,
        "from .. import apc as _apc\n",
        "from .. import disk_coordination\n",
    ),
    after(
        SERVER,
        "            self.apc_mode = _apc.model_apc_mode(language_model)\n",
        "            disk_coordination.open_tier(self)\n",
        within="ResponseGenerator._initialize_model",
    ),
    before(
        SERVER,
        "        pending = []\n",
        "        disk_coordination.tick(self)\n",
        within="ResponseGenerator._collect_pending_requests",
    ),
    before(
        SERVER,
        "            rqueue.put(\n                StreamingToken(\n",
        "            if r.finish_reason is not None:\n"
        "                disk_coordination.promise_end(self, rqueue)\n",
        within="ResponseGenerator._step_rows",
    ),
    after(
        SERVER,
        '        if getattr(item, "finish_reason", None):\n            self._ended = True\n',
        "            disk_coordination.hold_end(self._rqueue)\n",
        within="_TokenIterator.__next__",
    ),
    before(
        APP,
        "from ..generate.edit_image import",
        "from ..disk_coordination import flush_at_end\n",
    ),
    after(
        APP,
        "        yield\n    finally:\n",
        "        await flush_at_end(runtime)\n",
        within="lifespan",
    ),
]
