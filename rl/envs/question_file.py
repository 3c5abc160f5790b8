"""Questions and answers from a JSON-lines or parquet file: a task of your own, without code."""

import codecs
import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from rl.bounds import FilePath
from rl.envs.base import Env
from rl.envs.chat.messages import wrong_with
from rl.envs.numbers import NUMBER, last_number, value
from rl.errors import ConfigError, one_line
from rl.hub import data_file
from rl.types import Problem, StopReason

_FINAL = "####"


@dataclass(frozen=True)
class QuestionFile(Env):
    """Each line, or row, has `question` and `answer`; of an answer with ####, as GSM8K's, what follows it.
    In place of the question there may be `messages`, a conversation so far, which ends with the user's turn.

    The first `num_eval` lines are held out, the others train. Supervised learning reads `response`, or else
    the whole answer, as the demonstration, and `chosen` and `rejected` as a preference.
    """

    chat: bool = True
    path: FilePath = ""
    """The JSON-lines or parquet file, or hf://datasets/owner/name/file for one on the Hugging Face Hub."""
    match: Literal["number", "exact"] = "number"
    """Reward 1 where the response's last number equals the answer, or where the whole response does."""

    def eval_problems(self) -> list[Problem]:
        return self._read()[: self.num_eval]

    def train_problem(self, seed: int) -> Problem:
        problems = _train_problems(self._file, self._modified(), self.num_eval)
        if not problems:
            raise ConfigError(f"all problems of {self.path} are held out; lower env.num_eval={self.num_eval}")
        return random.Random(seed).choice(problems)

    def reward(self, problem: Problem, response: str, stop: StopReason) -> float:
        if stop != StopReason.STOP:
            return 0.0
        if self.match == "exact":
            return float(response.strip() == problem.answer.strip())
        number = last_number(response)
        return float(number is not None and value(number) == value(problem.answer))

    def demonstration(self, problem: Problem, seed: int) -> str:
        row = self.row(problem)
        return str(row["answer"] if row.get("response") is None else row["response"])

    def preference(self, problem: Problem, seed: int) -> tuple[str, str]:
        row = self.row(problem)
        if row.get("chosen") is None or row.get("rejected") is None:
            raise ConfigError(
                f"{problem.id} has no chosen and rejected, which data=preferences learns from; "
                f"add them to every line"
            )
        return str(row["chosen"]), str(row["rejected"])

    def validate(self) -> list[str]:
        return self._problems(num_trained=1)

    def validate_held_out(self) -> list[str]:
        return self._problems(num_trained=0)

    def _problems(self, num_trained: int) -> list[str]:
        """num_trained: how many problems there have to be beside the held-out ones."""
        try:
            exists = Path(self._file).is_file()
        except ConfigError as error:
            return [str(error)]
        if not exists:
            setting = f"env.path={self.path!r} is not a file"
            return [f"{setting}; give a JSON-lines file with question and answer on each line"]
        try:
            count = len(self._read())
        except ConfigError as error:
            return [str(error)]
        if count == 0:
            least = f"env.num_eval + 1 = {self.num_eval + 1}" if num_trained else f"{self.num_eval}"
            return [f"the dataset {self.path} is empty; give it at least {least} lines"]
        if count < self.num_eval + num_trained:
            problem = f"the dataset {self.path} has {count} lines"
            all_of_them = ", all of them held out" if num_trained else ""
            return [f"{problem}{all_of_them}; lower env.num_eval={self.num_eval}"]
        if num_trained and not _train_problems(self._file, self._modified(), self.num_eval):
            problem = f"every question of {self.path} is among the {self.num_eval} held-out ones"
            return [f"{problem}; lower env.num_eval"]
        if self.match == "number":
            bad = [p.id for p in self._read() if not NUMBER.fullmatch(p.answer.strip())]
            if bad:
                problem = f"{len(bad)} answers of {self.path} are not numbers, the first at {bad[0]}"
                return [f"{problem}; set its match to exact (--env.match exact), or fix them"]
        return []

    @property
    def _file(self) -> str:
        return data_file(self.path)

    def _read(self) -> list[Problem]:
        return _parse(self._file, self._modified())

    def row(self, problem: Problem) -> dict:
        """The whole object of its line."""
        return _rows(self._file, self._modified())[int(problem.id.rpartition(":")[2])]

    def _modified(self) -> int:
        return Path(self._file).stat().st_mtime_ns


@lru_cache(maxsize=8)
def _train_problems(path: str, modified: int, num_eval: int) -> list[Problem]:
    problems = _parse(path, modified)
    held_out = {problem.asked for problem in problems[:num_eval]}
    return [problem for problem in problems[num_eval:] if problem.asked not in held_out]


@lru_cache(maxsize=8)
def _parse(path: str, modified: int) -> list[Problem]:
    name, rows = Path(path).name, _rows(path, modified)
    return [
        Problem(
            f"{name}:{i}",
            row.get("question") or "",
            _final(str(row["answer"])),
            messages=tuple(row.get("messages") or ()),
        )
        for i, row in rows.items()
    ]


def _final(answer: str) -> str:
    """What follows GSM8K's ####, which ends its worked solutions."""
    return answer.rpartition(_FINAL)[2].strip() if _FINAL in answer else answer


@lru_cache(maxsize=8)
def _rows(path: str, modified: int) -> dict[int, dict]:
    """Line number -> object. modified: the file's time, so that a changed file is read again."""
    if Path(path).suffix == ".parquet":
        return _parquet_rows(path)
    rows = {}
    for number, line in enumerate(Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            rows[number] = json.loads(line.decode())
            wrong = _what_is_wrong(rows[number])
        except UnicodeDecodeError as error:
            wrong = f"is not UTF-8 ({error.reason} at byte {error.start})"
        except (ValueError, RecursionError) as error:
            wrong = f"is not JSON ({error})"
        if wrong:
            raise ConfigError(
                f"{path} line {number} {wrong}; each line is an object as "
                f'{{"question": "What is 2 + 2?", "answer": "4"}}'
            )
    return rows


def _parquet_rows(path: str) -> dict[int, dict]:
    from pyarrow import ArrowException, parquet  # not needed for JSON-lines

    try:
        rows = dict(enumerate(parquet.read_table(path).to_pylist(), 1))
    except (ArrowException, OSError) as error:
        raise ConfigError(
            f"{path} is not a readable parquet file ({one_line(error)}); fetch it again"
        ) from error
    for number, row in rows.items():
        if wrong := _what_is_wrong(row):
            raise ConfigError(f"{path} row {number} {wrong}; each row has a question and an answer")
    return rows


def _wrong_question(question: object) -> str:
    if not isinstance(question, str):
        return f"has a question that is not a string ({question!r:.40})"
    return "" if question.strip() else "has an empty question"


def _wrong_messages(messages: object) -> str:
    if not isinstance(messages, list) or not messages:
        return f"has messages that are no list of messages ({messages!r:.40})"
    for message in messages:
        if wrong := wrong_with(message):
            return f"has the message {message!r:.40}: {wrong}"
        if message.get("content") is None:
            return f"has a message without a content ({message!r:.40})"
    return "" if messages[-1]["role"] == "user" else "has messages that do not end with the user's"


def _what_is_wrong(row: object) -> str:
    if not isinstance(row, dict):
        return "is not an object"
    asks = "messages" if row.get("messages") is not None else "question"
    if missing := [name for name in (asks, "answer") if name not in row]:
        return f"has no {' and no '.join(missing)}"
    if wrong := _wrong_messages(row["messages"]) if asks == "messages" else _wrong_question(row["question"]):
        return wrong
    if isinstance(row["answer"], bool) or not isinstance(row["answer"], str | int | float):
        return f"has an answer that is neither a string nor a number ({row['answer']!r:.40})"
    for name in (name for name in ("response", "chosen", "rejected") if row.get(name) is not None):
        if isinstance(row[name], bool) or not isinstance(row[name], str | int | float):
            return f"has a {name} that is neither a string nor a number ({row[name]!r:.40})"
    text = json.dumps(row, ensure_ascii=False, default=str)
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "holds half of a character (a lone surrogate, \\ud800 to \\udfff)"
    return ""
