"""A harness of verifiers' v1 API in the episode's own process: a chat with the taskset's tools.

verifiers finds it by this module's name.
"""

import json
from contextlib import AsyncExitStack
from typing import Any

from mcp import Client
from openai import APIStatusError, AsyncOpenAI, omit
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

from rl.envs.adapters.mcp import call_tool, list_tools, schema_of

__all__ = ["ChatHarness"]


class ChatHarness(Harness[HarnessConfig]):
    """Ends with the first answer that calls no tool, or as the context or the turns are used up."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
            )
            tools, places = await _tools(stack, mcp_urls)
            while True:
                asked = client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools or omit
                )
                try:
                    message = (await asked).choices[0].message
                except APIStatusError as error:
                    if error.code not in ("context_length_exceeded", "turns_used_up"):
                        raise
                    return ProgramResult(0, "", "")  # it is scored as it stands, as by verifiers' own loop
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return ProgramResult(0, message.content or "", "")
                for call in message.tool_calls:
                    messages.append(
                        {"role": "tool", "tool_call_id": call.id, "content": await _called(call, places)}
                    )


async def _tools(
    stack: AsyncExitStack, urls: dict[str, str]
) -> tuple[list[Any], dict[str, tuple[Client, str]]]:
    """Of all servers: their descriptions, and where each is, by its name with the server's before it."""
    tools, places = [], {}
    for server, url in urls.items():
        client = await stack.enter_async_context(Client(url))
        for tool in await list_tools(client):
            name = f"{server}_{tool.name}" if server else tool.name
            tools.append(schema_of(tool, name))
            places[name] = client, tool.name
    return tools, places


async def _called(call: Any, places: dict[str, tuple[Client, str]]) -> str:
    """What the policy is told: the tool's result, or what is wrong with the call."""
    name = call.function.name
    if name not in places:
        return f"Error: there is no tool {name}; there are {', '.join(places) or 'none'}"
    client, tool = places[name]
    try:
        return await call_tool(client, tool, json.loads(call.function.arguments))
    except RuntimeError as error:
        return f"Error: {error}"
