"""Two tools, a call of each as models write it, and a request that brings both."""

from support.http_app import MESSAGES

CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Of a city", "parameters": PARAMETERS},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ARGUMENTS = '{"city": "Paris {\\"} é"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
MISTRAL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
WEATHER_CALL = ("get_weather", ARGUMENTS)


async def ask(client, **fields):
    return await client.post(CHAT, json={"messages": MESSAGES, "tools": [WEATHER, CLOCK]} | fields)
