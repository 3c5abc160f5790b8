"""What a policy says in each turn, as an OpenAI endpoint, and the data that word games read."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.json_server import JSONHandler, completion

# Of its import it keeps sys.stderr, and a test's own is closed after it.
try:
    import nltk.downloader
except ImportError:
    nltk = None


class Policy(JSONHandler):
    """Says in each turn what the server's `texts` have there, the last again and again. It streams one chunk."""

    def do_POST(self):
        asked = self.body()
        turn = sum(message["role"] == "assistant" for message in asked["messages"])
        text = self.server.texts[min(turn, len(self.server.texts) - 1)]
        head, *calls = text.split("<tool_call>")
        message = {"role": "assistant", "content": head}
        if calls:
            message["tool_calls"] = [_call_of(call, i) for i, call in enumerate(calls)]
        whole = completion(message)
        (choice,) = whole["choices"]
        choice["finish_reason"] = "tool_calls" if calls else "stop"
        if not asked.get("stream"):
            return self.reply(200, whole)
        choice["delta"] = choice.pop("message")
        chunks = [json.dumps(whole | {"object": "chat.completion.chunk"}), "[DONE]"]
        self.send("text/event-stream", "".join(f"data: {chunk}\n\n" for chunk in chunks))

    def send(self, kind, text):
        data = text.encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _call_of(text: str, number: int) -> dict:
    call = json.loads(text.removesuffix("</tool_call>"))
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"id": str(number), "index": number, "type": "function", "function": function}


def write_words(home: Path, words: Sequence[str]) -> None:
    """NLTK's word lists and its tagger, cut to these nouns, where it looks for them in a home directory.

    TextArena's games draw from them, and fetch them where they are missing.
    """
    lists = home / "nltk_data" / "corpora" / "words"
    lists.mkdir(parents=True, exist_ok=True)
    if nltk is not None:  # of its import it keeps the home directory, too
        nltk.data.path.insert(0, str(home / "nltk_data"))
    for name in ("en", "en-basic"):
        (lists / name).write_text("".join(f"{word}\n" for word in words))
    (lists / "README").write_text("")
    tagger = home / "nltk_data" / "taggers" / "averaged_perceptron_tagger_eng"
    tagger.mkdir(parents=True, exist_ok=True)
    nouns = dict.fromkeys(words, "NN")
    for part, value in (("weights", {}), ("tagdict", nouns), ("classes", ["NN"])):
        (tagger / f"{tagger.name}.{part}.json").write_text(json.dumps(value))
