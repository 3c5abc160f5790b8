"""OpenAI's completions, for evaluation tools: any client of theirs samples the base model or a checkpoint.

The model's name is a base model's, or a checkpoint's tinker:// path. With `return_token_ids`, choices carry
their token ids and, with `logprobs`, each token's logprob.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import cached_property, partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rl.http_server import unless_gone
from rl.models.tokenizer import HFTokenizer
from rl.openai_format import answer, chat_logprobs, choice, head, text_logprobs, usage
from rl.tinker.json_schemas import of_response_format
from rl.tinker.openai_chat import THINK, Chats, Deltas, Turn
from rl.tinker.openai_requests import ChatRequest, CompletionsRequest, Prompts, SamplingRequest
from rl.tinker.openai_stream import SLICE_TOKENS, EventStream, PartialText, Piece, interleaved, pieces
from rl.tinker.paths import EXTERNAL
from rl.tinker.service import Service
from rl.types import Completion
from rl.waiting import together

_APART = 1_000_003  # seeds of neighbouring slices
_TAIL = 16  # tokens of a prompt's end: room for the tag that opens the reasoning


def add_openai_routes(app: FastAPI, service: Service, tokenizer: HFTokenizer) -> None:
    api = APIRouter(prefix="/v1")
    chats, prompts = Chats(tokenizer), Prompts(tokenizer, service.backend.context_length)

    @api.get("/models")
    async def models(request: Request) -> Any:
        rows = service.checkpoints.list(request.state.tenant)
        paths = [row.path for row in rows if row.kind != EXTERNAL]
        names = [*service.model_names, *paths]
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", "owned_by": "rl"} for name in names],
        }

    @api.post("/completions")
    async def completions(body: CompletionsRequest, request: Request) -> Response:
        body.check(service.limits.max_samples)
        tokens = await prompts.read(body.prompt)
        schema = of_response_format(body.response_format)
        sampler = _Sampler(service, tokenizer, request.state.tenant, body, body.logprobs or 0, schema)
        if body.stream:
            return await unless_gone(request, EventStream.begin(_text_records(body, sampler, tokens)))
        return await unless_gone(request, _text_answer(body, sampler, tokens))

    @api.post("/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        body.check(service.limits.max_samples)
        turn = chats.turn(body.tools, body.tool_choice, body.response_format, body.parallel_tool_calls)
        prompt = await prompts.of_chat(lambda: chats.prompt(body.messages, turn), body.num_characters)
        top = body.top_logprobs or 0
        sampler = _Sampler(service, tokenizer, request.state.tenant, body, top, turn.schema)
        if body.stream:
            return await unless_gone(request, EventStream.begin(_chat_records(body, sampler, prompt, turn)))
        return await unless_gone(request, _chat_answer(body, sampler, prompt, turn))

    app.include_router(api)


class _Sampler:
    """Samples what one request asks for."""

    def __init__(
        self,
        service: Service,
        tokenizer: HFTokenizer,
        tenant: str,
        body: SamplingRequest,
        num_likeliest: int,
        schema: str = "",
    ):
        """schema: JSON's, which the answers are held to; it has to be sampled in one piece."""
        self.tokenizer = tokenizer
        self._service = service
        self._tenant = tenant
        self._body = body
        self._num_likeliest = num_likeliest
        self._schema = schema

    async def whole(self, prompts: Sequence[Sequence[int]]) -> list[list[Completion]]:
        """`n` of each prompt."""
        answers: list[list[Completion]] = [[] for _ in prompts]

        async def of(index: int) -> None:
            answers[index] = await self._sample(prompts[index], self._body.n, self._body.stops or None)

        await together(map(of, range(len(prompts))))
        return answers

    def streams(self, prompts: Sequence[Sequence[int]]) -> list[AsyncIterator[Piece]]:
        """As `whole`, flat."""
        return [self._stream(prompt, i) for prompt in prompts for i in range(self._body.n)]

    def _stream(self, prompt: Sequence[int], index: int) -> AsyncIterator[Piece]:
        room = self._service.backend.context_length - len(prompt)
        limit = min(self._body.limit or room, room)
        size = limit if self._schema else SLICE_TOKENS
        return pieces(partial(self._slice, index), prompt, limit, self._partial_text(), size)

    async def _slice(self, index: int, tokens: list[int], size: int, number: int) -> Completion:
        seed = None if self._body.seed is None else self._body.seed + index + _APART * number
        # Stop strings may span slices: PartialText looks for them.
        (completion,) = await self._sample(tokens, 1, None, max_tokens=size, seed=seed)
        return completion

    async def _sample(
        self, prompt: Sequence[int], n: int, stop: Sequence[str] | str | None, **settings: Any
    ) -> list[Completion]:
        body = self._body
        room = max(1, self._service.backend.context_length - len(prompt))
        asked = {
            "num_samples": n,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            "topk_sample_logprobs": self._num_likeliest,
            "json_schema": self._schema,
            "sampling_params": {
                "max_tokens": body.limit and min(body.limit, room),
                "seed": body.seed,
                "stop": stop,
                "temperature": body.temperature,
                "top_k": body.top_k,
                "top_p": body.top_p,
                **settings,
            },
        }
        return await self._service.sampling.sample(self._tenant, self._directory, asked)

    @cached_property
    def _directory(self) -> str | None:
        """The same for all slices, also where the checkpoint is saved anew meanwhile."""
        return self._service.sampled_directory(self._tenant, self._body.model)

    def text(self, completion: Completion) -> str:
        _, text, _ = self._partial_text().add(completion.tokens.tolist(), is_end=True)
        return text

    def _partial_text(self) -> PartialText:
        return PartialText(self.tokenizer.decode, self.tokenizer.decode_with_special, self._body.stops)


async def _text_answer(
    body: CompletionsRequest, sampler: _Sampler, prompts: Sequence[Sequence[int]]
) -> Response:
    answers = await sampler.whole(prompts)
    choices: list[dict[str, Any]] = []
    for prompt, completions in zip(prompts, answers, strict=True):
        for completion in completions:
            entry = choice(len(choices), completion, body.return_token_ids)
            entry["text"] = sampler.text(completion)
            if body.logprobs is not None:
                entry["logprobs"] = text_logprobs(sampler.tokenizer, completion)
            if body.return_token_ids:
                entry["prompt_token_ids"] = list(prompt)
            choices.append(entry)
    num_sampled = sum(len(completion.tokens) for completions in answers for completion in completions)
    whole = head("text_completion", body.model)
    whole |= {"choices": choices, "usage": usage(sum(map(len, prompts)), num_sampled)}
    if body.return_token_ids and len(prompts) == 1:
        whole["prompt_token_ids"] = list(prompts[0])
    return JSONResponse(whole)


async def _chat_answer(body: ChatRequest, sampler: _Sampler, prompt: Sequence[int], turn: Turn) -> Response:
    (completions,) = await sampler.whole([prompt])
    choices = []
    for i, completion in enumerate(completions):
        entry = choice(i, completion, body.return_token_ids)
        entry["message"], entry["finish_reason"] = turn.message(sampler.text(completion), completion.stop)
        if body.logprobs:
            entry["logprobs"] = chat_logprobs(sampler.tokenizer, completion)
        choices.append(entry)
    return JSONResponse(
        answer("chat.completion", body.model, prompt, completions, choices, body.return_token_ids)
    )


def _text_records(
    body: CompletionsRequest, sampler: _Sampler, prompts: Sequence[Sequence[int]]
) -> AsyncGenerator[dict[str, Any]]:
    def entry(index: int, piece: Piece) -> dict[str, Any]:
        part = choice(index, piece.completion, body.return_token_ids)
        part |= {"text": piece.text, "finish_reason": piece.end and str(piece.end)}
        if body.logprobs is not None:
            part["logprobs"] = text_logprobs(sampler.tokenizer, piece.completion)
        return part

    return _records("text_completion", body, sampler, prompts, entry)


def _chat_records(
    body: ChatRequest, sampler: _Sampler, prompt: Sequence[int], turn: Turn
) -> AsyncGenerator[dict[str, Any]]:
    thinks = sampler.tokenizer.decode_with_special(prompt[-_TAIL:]).rstrip().endswith(THINK)
    deltas = [Deltas(turn, thinks) for _ in range(body.n)]

    def entry(index: int, piece: Piece) -> dict[str, Any]:
        part = choice(index, piece.completion, body.return_token_ids)
        part["delta"], part["finish_reason"] = deltas[index].next(piece.text, piece.end)
        if body.logprobs:
            part["logprobs"] = chat_logprobs(sampler.tokenizer, piece.completion)
        return part

    return _records("chat.completion.chunk", body, sampler, [prompt], entry)


async def _records(
    kind: str,
    body: SamplingRequest,
    sampler: _Sampler,
    prompts: Sequence[Sequence[int]],
    entry: Callable[[int, Piece], dict[str, Any]],
) -> AsyncGenerator[dict[str, Any]]:
    """entry(index, piece): the choice of a chunk."""
    first = head(kind, body.model)
    with_usage = bool((body.stream_options or {}).get("include_usage"))
    shared: dict[str, Any] = {"usage": None} if with_usage else {}
    num_sampled = 0
    merged = interleaved(sampler.streams(prompts))
    try:
        async for index, piece in merged:
            num_sampled += len(piece.completion.tokens)
            yield first | {"choices": [entry(index, piece)]} | shared
    finally:
        await merged.aclose()
    if with_usage:
        yield first | {"choices": [], "usage": usage(sum(map(len, prompts)), num_sampled)}
