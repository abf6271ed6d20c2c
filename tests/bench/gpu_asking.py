"""A server that switches sides, and who asks it; the parts of ``gpu_sides``."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.bench import gpu_tables
from tests.bench.gpu_session import HTTP, BenchServer, Session, seen
from tests.bench.gpu_switch import OFF


class SwitchServer(BenchServer):
    """A server that starts without a prefix cache and can become each side."""

    side = OFF
    kernels = ""

    def command(self, port: int) -> list[str]:
        """As the others' command line, with the module that can switch."""
        words = super().command(port)
        return [word.replace("gpu_server", "gpu_switch") for word in words]

    def environment(self) -> dict[str, str]:
        """Kernels are compiled once for all starts."""
        return {**super().environment(), "MLX_PTX_CACHE_DIR": self.kernels}

    def stop(self) -> None:
        """End it at once: it holds nothing that must be written."""
        if self._process is not None:
            self._process.kill()
        super().stop()


class Sides(Session):
    """Asks one server, side after side, and keeps raw rows."""

    base = ""
    side = ""

    def switch(self, side: str) -> None:
        """Make the server this side; one request goes by untimed."""
        if side == self.side:
            return
        answer = HTTP.get(f"{self.base}/bench/switch", params={"side": side})
        answer.raise_for_status()
        if "error" in answer.json():
            raise RuntimeError(f"no switch to {side}: {answer.json()['error']}")
        self.rows.setdefault("switches", []).append(answer.json())
        self.side = side
        self.ask(self.base, [{"role": "user", "content": "."}], max_tokens=4)
        seen(self.base)

    def timed(self, messages: list[dict[str, str]], **body: Any) -> dict[str, Any]:
        """One request with what the server saw of it."""
        row = self.ask(self.base, messages, **body)
        return joined([row], seen(self.base))[0]

    def free(self, number: int, **more: Any) -> dict[str, Any]:
        """A free greedy reply to a last message of this number."""
        messages = self.numbered(number)
        body = {"temperature": 0, "max_tokens": self.options.pair_tokens, **more}
        return self.timed(messages, **body)

    def numbered(self, number: int) -> list[dict[str, str]]:
        """The pairs' prompt with a last message of its own."""
        turn = self.options.pair_turns[self.options.now]
        said = self.plan.replies[: turn - 1]
        *before, last = self.plan.messages("p", said)
        return [*before, {**last, "content": f"{number:05d} {last['content']}"}]

    def ask(
        self, base: str, messages: list[dict[str, str]], **body: Any
    ) -> dict[str, Any]:
        """As the base's; one that is not streamed has no text of interest."""
        if body.pop("streamed", True):
            return super().ask(base, messages, **body)
        body = {"model": self.options.folder, "messages": messages, **body}
        sent = time.perf_counter()
        answer = HTTP.post(f"{base}/v1/chat/completions", json=body)
        answer.raise_for_status()
        usage = answer.json()["usage"]
        return {
            "prompt": usage.get("prompt_tokens") or usage.get("input_tokens"),
            "restored": 0,
            "generated": usage.get("completion_tokens") or usage.get("output_tokens"),
            "ttft": None,
            "seconds": time.perf_counter() - sent,
            "sent": sent,
            "text": "",
        }


def joined(rows: list[dict[str, Any]], requests: list[Any]) -> list[dict[str, Any]]:
    """Add what the server saw, prefill steps one by one (seconds)."""
    gpu_tables.join_seen(rows, requests)
    for row, request in zip(rows, requests, strict=True):
        row["ms"] = [round(1000 * gap, 2) for gap in row.pop("gaps")]
        row["thread"] = gpu_tables.short(request.get("thread"))
        kept = ("prompt_step", "generate", "store_checkpoint", "commit", "merge_rows")
        first = request["times"][0]
        row["steps"] = [
            [name, round(began - row["sent"], 4), round(seconds, 4)]
            for name, began, seconds in request["seams"]
            if name in kept and began < first
        ]
    return rows


def machine(gpu: str) -> dict[str, Any]:
    """What else can make a process slow: steal time, load, the GPU's clocks."""
    out: dict[str, Any] = {"at": round(time.monotonic(), 2), "load": os.getloadavg()}
    stat = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    out["ticks"] = dict(
        zip(
            ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"),
            map(int, stat[1:9]),
            strict=True,
        )
    )
    wanted = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    command = ["nvidia-smi", "-i", gpu, "--format=csv,noheader"]
    try:
        done = subprocess.run(
            [*command, f"--query-gpu={wanted}"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
        out["gpu"] = done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        pass
    return out
