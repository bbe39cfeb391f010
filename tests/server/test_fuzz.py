"""Random bodies never meet a 5xx, and whatever is refused has OpenAI's body."""

import json

import anyio
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.fake_engine import FakeEngine
from support.http_app import MESSAGES, http_client, make_app

from plait.platform.server.fields import IGNORED, REFUSED
from plait.platform.server.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

FAST = settings(
    max_examples=150,
    deadline=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
SCHEMAS = {
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": MESSAGES}),
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 30)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "text", "auto", "none", "user", "a" * 2000, "\x00", "é👋🏽"])
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "1"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool"])},
        optional={"content": values, "name": values, "tool_calls": values},
    ),
    max_size=3,
)


def bodies(path):
    schema, base = SCHEMAS[path]
    names = st.sampled_from(sorted({*schema.model_fields, *IGNORED, *REFUSED, "typo"}))
    fields = st.dictionaries(names, values, max_size=6)
    if "messages" in base:
        fields = st.builds(lambda f, m: {"messages": m} | f, fields, messages) | fields
    return st.builds(lambda f: base | f, fields)


def check(response):
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]


@pytest.mark.parametrize("path", SCHEMAS)
def test_random_fields_never_fail_the_server(path):
    @FAST
    @given(bodies(path))
    def run(body):
        anyio.run(post, path, json.dumps(body).encode())

    run()


@FAST
@given(st.binary(max_size=60) | st.text('{}[]",:0123eE+-.ntf\\u ', max_size=60).map(str.encode))
def test_random_bytes_never_fail_the_server(content):
    anyio.run(post, "/v1/completions", content)


engine = FakeEngine()
app = make_app(engine)


async def post(path, content):
    headers = {"content-type": "application/json"}
    async with http_client(app) as http:
        check(await http.post(path, content=content, headers=headers))
    assert engine.num_open == 0
    engine.requests.clear()


async def lasting_app(scope, receive, send):
    """The application; its life does not end with each of schemathesis's calls."""
    if scope["type"] == "lifespan":
        for step in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{step}.complete"})
    else:
        await app(scope, receive, send)


schema = schemathesis.openapi.from_asgi("/openapi.json", lasting_app)


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
def test_every_operation_of_the_openapi_document(case):
    check_metrics = case.path == "/metrics"
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code != 200 and not check_metrics:
        assert "error" in response.json()
