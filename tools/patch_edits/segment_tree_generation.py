"""segment-tree, in the generators: one coordinator, always; no layout has a path of its own."""

from tools.patch_tree import AnyEdit, Body, Cut, Delete, Edit, WithFile, after, before

AR = "mlx_vlm/generate/ar.py"
DISPATCH = "mlx_vlm/generate/dispatch.py"
DIFFUSION = "mlx_vlm/generate/diffusion.py"
ROWS = "mlx_vlm/generate/recurrent_rows.py"

GENERATION: list[AnyEdit] = [
    before(
        AR,
        "from .types import GenerateKwargs",
        "from ..segment_coordination import configure, keep_prefilled, keep_removed\n",
    ),
    # One coordinator, always: the branches for callers without one go.
    Edit(
        AR,
        "        apc_mode: Optional[str] = None,\n",
        "",
        within="PromptProcessingBatch.__init__",
    ),
    Edit(AR, "        self._apc_mode = apc_mode\n", ""),
    Body(
        AR,
        "PromptProcessingBatch._apc_uses_checkpoints",
        '    coordinator = getattr(self, "_apc_coordinator", None)\n'
        "    return coordinator is not None and coordinator.is_checkpoint\n",
    ),
    Delete(AR, "PromptProcessingBatch._apc_prompt_cache_for_store"),
    Cut(
        AR,
        '            coordinator = getattr(self, "_apc_coordinator", None)\n',
        '            meta["checkpoint_stored"] = checkpoint_len\n',
        "            stored = self._apc_coordinator.store_checkpoint(\n"
        '                meta["full_input_ids"][:checkpoint_len],\n'
        "                self.prompt_cache,\n"
        "                batch_idx=batch_idx,\n"
        '                extra_hash=meta.get("extra_hash", 0),\n'
        "            )\n",
        within="PromptProcessingBatch._store_apc_exact_checkpoints",
    ),
    after(
        AR,
        '        """Process one chunk of the prompt. Returns tokens processed."""\n',
        "        try:\n"
        "            return self._prompt_step()\n"
        "        except Exception:\n"
        "            for index in range(len(self.uids)):\n"
        "                keep_prefilled(self, index, with_state=False)\n"
        "            raise\n"
        "\n"
        "    def _prompt_step(self) -> int:\n",
        within="PromptProcessingBatch.prompt_step",
    ),
    Edit(
        AR,
        "harvest the post-prefill K/V into hashed blocks. Done after the",
        "take in what the prefill added. Done after the",
        within="PromptProcessingBatch.generate",
    ),
    Edit(
        AR,
        "        # so the block tensors snapshot the prompt prefix.\n",
        "        # so that the copies are of the prompt alone.\n",
        within="PromptProcessingBatch.generate",
    ),
    Cut(
        AR,
        "                        # A third, full-prompt copy",
        '                        self._apc_manager.release(meta.get("apc_blocks", []))\n'
        "                        continue\n",
        "                        # The guard checkpoint also serves conversation\n"
        "                        # extensions.\n",
        within="PromptProcessingBatch.generate",
    ),
    Cut(
        AR,
        '                    coordinator = getattr(self, "_apc_coordinator", None)\n',
        "            except Exception as e:\n"
        '                logger.warning("APC harvest failed',
        "                    self._apc_coordinator.commit(\n"
        "                        self.prompt_cache,\n"
        '                        meta["full_input_ids"],\n'
        "                        batch_idx=batch_idx,\n"
        '                        extra_hash=meta.get("extra_hash", 0),\n'
        '                        skip_first_n_tokens=meta.get("prefix_len", 0),\n'
        '                        blocks_in_use=meta.get("apc_blocks", []),\n'
        "                    )\n",
        within="PromptProcessingBatch.generate",
    ),
    Edit(
        AR,
        '            own = hasattr(model, "make_cache")\n'
        "            self.apc.plain_rows = draft_model is None and own\n",
        "            configure(self.apc, self.tokenizer, plain_rows=draft_model is None)\n",
        within="BatchGenerator.__init__",
    ),
    Cut(
        AR,
        '        if self.apc_manager is None or getattr(self, "apc_mode"',
        "    def _apc_exact_checkpoint_lengths(",
        "        return 0\n\n",
        within="BatchGenerator",
    ),
    Cut(
        AR,
        "        boundary = self._apc_exact_checkpoint_len(ids_list)\n",
        "    def _apc_pick_for(",
        "        return []\n\n",
        within="BatchGenerator",
    ),
    Edit(
        AR,
        "Returns dict with matched\n        blocks + suffix metadata",
        "Returns dict with its\n        lease + suffix metadata",
    ),
    Cut(
        AR,
        '        coordinator = getattr(self, "apc", None)\n        lookup_kwargs = {\n',
        "    def _build_mixed_prompt_batch(",
        "        return self.apc.lookup(\n"
        "            ids_list,\n"
        "            extra_hash=self._apc_extra_hash(prompt_kwargs or {}),\n"
        "            safe_lookup_min=self._apc_safe_prefix_lookup_min(ids_list),\n"
        "            suffix_is_text_only=lambda pl: self._apc_suffix_is_text_only(\n"
        "                ids_list, pl\n"
        "            ),\n"
        "            prefix_has_media=lambda pl: self._apc_prefix_has_media_tokens(\n"
        "                ids_list, pl\n"
        "            ),\n"
        "        )\n"
        "\n",
        within="BatchGenerator",
    ),
    Edit(AR, '        apc_mode = getattr(self, "apc_mode", "block")\n', ""),
    Cut(
        AR,
        '        coordinator = getattr(self, "apc", None)\n        if coordinator is not None:\n            warm_cache',
        "        if warm_cache is None:\n",
        "        warm_cache, _ = self.apc.merge_rows(\n"
        "            picks,\n"
        "            prefix_lens,\n"
        "            kv_quant_config=_quant_cfg,\n"
        "        )\n",
        within="BatchGenerator._build_mixed_prompt_batch",
    ),
    Edit(AR, "            apc_mode=apc_mode,\n", ""),
    Edit(AR, "                apc_mode=self.apc_mode,\n", ""),
    after(
        AR,
        '        """Remove a sequence from the batch by uid."""\n',
        "        keep_removed(self, uid)\n",
        within="BatchGenerator.remove",
    ),
    Edit(
        DISPATCH,
        "apc_blocks_in_use: List[_apc.APCBlock] = []",
        "apc_blocks_in_use: List[Any] = []",
    ),
    Edit(
        DISPATCH,
        "    # APC: cross-request, hash-based prefix",
        "    # APC: cross-request prefix",
    ),
    Edit(DISPATCH, "from ..kv_quant import from_legacy as kv_quant_from_legacy\n", ""),
    Edit(DISPATCH, '            warm_cache = plan.get("warm_cache")\n', ""),
    Cut(
        DISPATCH,
        "                _quant_policy = kv_quant_from_legacy(\n",
        "                apc_coordinator.release_hit(plan)\n",
        '                kwargs["prompt_cache"] = apc_coordinator.materialize_single(plan)\n'
        "            else:\n",
    ),
    Cut(
        DIFFUSION,
        "                apc_hit,\n                min_capacity_tokens",
        "            )\n            if apc is not None and apc_hit is not None",
        "                apc_hit\n",
    ),
    Edit(
        DISPATCH,
        "    # APC: harvest new blocks from the post-generation KV state.\n",
        "    # APC: take in what the generation added.\n",
    ),
    # What recurrent-rows has brought, where it is there.
    WithFile(
        Cut(
            ROWS,
            '    segments = getattr(manager, "segments", None)\n',
            None,
            "    return manager.segments.peek(ids, extra_hash)\n",
            within="_prefix_len",
        )
    ),
]
