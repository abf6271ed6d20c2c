"""Count the tokens of a session's recorded run: each prompt, all prompts together, and what the model wrote.

With a model directory, its own tokenizer and chat template count:

    python tools/count_session.py coding-agent-18 --tokenizer DIR

With a BPE rank file, Qwen2.5's control tokens and template are used; the package ``dashscope`` carries the ranks of
that family (152k tokens), and ``tiktoken`` reads them.  Neither is needed by the project, so take another environment:

    pip install tiktoken && pip download --no-deps dashscope && unzip -j dashscope-*.whl '*/qwen.tiktoken'
    python tools/count_session.py coding-agent-18 --ranks qwen.tiktoken
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_vlm_cacheplus.replay import session as sessions  # noqa: E402
from mlx_vlm_cacheplus.replay.history import History, recorded_reply  # noqa: E402

_CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
)
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TOOLS = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

Render = Callable[[list[dict[str, Any]], list[Any], bool], int]


def chatml(messages: list[dict[str, Any]], tools: list[Any], ask: bool) -> str:
    """A history as Qwen2.5's template writes it; ``ask`` opens the model's turn."""
    system = (
        messages[0]["content"]
        if messages[0]["role"] == "system"
        else "You are a helpful assistant."
    )
    if tools:
        system += _TOOLS.format(
            signatures="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        )
    out, previous = [f"<|im_start|>system\n{system}<|im_end|>\n"], ""
    rest = [message for message in messages if message["role"] != "system"]
    for place, message in enumerate(rest):
        role, content = message["role"], message["content"]
        if role == "tool":
            following = rest[place + 1]["role"] if place + 1 < len(rest) else ""
            out.append("" if previous == "tool" else "<|im_start|>user")
            out.append(f"\n<tool_response>\n{content}\n</tool_response>")
            out.append("" if following == "tool" else "<|im_end|>\n")
        else:
            out.append(f"<|im_start|>{role}\n{content}")
            for index, call in enumerate(message.get("tool_calls", [])):
                body = f'{{"name": "{call["function"]["name"]}", "arguments": {call["function"]["arguments"]}}}'
                out.append(
                    f"{chr(10) if content or index else ''}<tool_call>\n{body}\n</tool_call>"
                )
            out.append("<|im_end|>\n")
        previous = role
    return "".join(out) + ("<|im_start|>assistant\n" if ask else "")


def ranks_counter(path: Path) -> Render:
    """Counts with a BPE rank file."""
    import tiktoken

    ranks = {
        base64.b64decode(token): int(rank)
        for token, rank in map(bytes.split, path.read_bytes().splitlines())
    }
    control = {token: len(ranks) + index for index, token in enumerate(_CONTROL)}
    encoding = tiktoken.Encoding(
        "qwen", pat_str=_SPLIT, mergeable_ranks=ranks, special_tokens=control
    )

    def count(messages: list[dict[str, Any]], tools: list[Any], ask: bool) -> int:
        return len(encoding.encode(chatml(messages, tools, ask), allowed_special="all"))

    return count


def model_counter(directory: Path) -> Render:
    """Counts with the tokenizer and template of a model directory."""
    from mlx_vlm_cacheplus.replay.tokens import ModelTokenizer

    tokenizer = ModelTokenizer(directory)

    def count(messages: list[dict[str, Any]], tools: list[Any], ask: bool) -> int:
        return len(tokenizer.prompts(messages, tools, None, ask=ask)[0])

    return count


def table(played: sessions.Session, count: Render) -> list[tuple[int, int]]:
    """(prompt, written) for each turn; written is what the model adds up to and with its end-of-turn token."""
    history, rows = History(played), []
    for number, turn in enumerate(played.turns, 1):
        history.add_turn(turn)
        prompt = count(history.messages, played.tools, True)
        history.add_reply(recorded_reply(turn, number))
        newline = (
            1  # the template's line end behind the end-of-turn token is not the model's
        )
        rows.append(
            (prompt, count(history.messages, played.tools, False) - prompt - newline)
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("session")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tokenizer", type=Path, metavar="DIR")
    source.add_argument("--ranks", type=Path, metavar="FILE")
    args = parser.parse_args()
    played = sessions.load(args.session)
    rows = table(
        played,
        ranks_counter(args.ranks) if args.ranks else model_counter(args.tokenizer),
    )
    for number, (prompt, written) in enumerate(rows, 1):
        print(f"turn {number:3}  prompt {prompt:6}  written {written:5}")
    print(f"prompts together {sum(prompt for prompt, _ in rows)}")
    print(f"written together {sum(written for _, written in rows)}")
    print(f"at the end {rows[-1][0] + rows[-1][1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
