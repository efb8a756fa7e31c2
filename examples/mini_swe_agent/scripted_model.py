"""A chat endpoint that answers from a script, instead of a model that can repair code: `scripted_model.py PORT`."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMANDS = (
    "cat calc.py tests.py",
    "sed -i 's/x + 1/x + x/' calc.py",
    "python tests.py && echo passed",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
)


class Script(BaseHTTPRequestHandler):
    """Answers with the command whose number is that of the earlier answers."""

    def do_POST(self) -> None:
        """Answer a chat completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        command = COMMANDS[min(turn, len(COMMANDS) - 1)]
        text = f"THOUGHT: step {turn + 1} of the script.\n\n```mswea_bash_command\n{command}\n```"
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 1, "completion_tokens": len(text) // 4, "total_tokens": 1}
        reply = {"id": "0", "object": "chat.completion", "created": 0, "model": "script", "usage": usage}
        content = json.dumps({**reply, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Do not print requests."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Script).serve_forever()
