"""waiting-streams: where handlers wait for a reply, they wait in the room."""

from tools.patch_tree import AnyEdit, Edit, after, before

APP = "mlx_vlm/server/app.py"
OPENAI = "mlx_vlm/server/openai.py"
ANTHROPIC = "mlx_vlm/server/anthropic.py"
COMPACTION = "mlx_vlm/server/compaction.py"

CORE = {"mlx_vlm_cacheplus/core/waiting_room.py": "mlx_vlm/server/waiting_room.py"}

IMPORT = "from .waiting_room import wait_in_thread\n"
# What a handler calls in a thread, by function: the row, then each token; or all at once.
ROW = "(\n                            runtime.response_generator.generate,"
WAITS = (
    (OPENAI, "responses_endpoint", ROW),
    (OPENAI, "responses_endpoint", "(_next_token_resp_stream)"),
    (OPENAI, "responses_endpoint", "(_blocking_resp)"),
    (OPENAI, "chat_completions_endpoint", ROW),
    (OPENAI, "chat_completions_endpoint", "(_next_token)"),
    (OPENAI, "chat_completions_endpoint", "(_blocking_generate)"),
    (ANTHROPIC, "anthropic_messages_endpoint", ROW),
    (ANTHROPIC, "anthropic_messages_endpoint", "(_next_token)"),
    (ANTHROPIC, "anthropic_messages_endpoint", "(_blocking_generate)"),
    (COMPACTION, "compact_response_context", "(run)"),
)

EDITS: list[AnyEdit] = [
    *(
        after(path, "from .runtime import runtime\n", IMPORT)
        for path in (OPENAI, ANTHROPIC, COMPACTION)
    ),
    *(
        Edit(path, "asyncio.to_thread" + call, "wait_in_thread" + call, within=name)
        for path, name, call in WAITS
    ),
    before(
        APP,
        "MAX_IMAGES = 10",
        "app.add_middleware(RequestsHaveRoom)\n\n",
    ),
    after(
        APP,
        "from .schemas import ChatLogprobContent, ModelsResponse, TopLogprob\n",
        "from .waiting_room import RequestsHaveRoom\n",
    ),
]
