"""Drafts over HTTP: what a request may say of them, and what usage and metrics tell."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.http_app import MESSAGES, openai_client, sse_events

from plait.platform.core import Speculation
from plait.platform.messages import Stats
from plait.speculative.tally import ROW_CLASSES

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "Once"}}
DRAFTS = {"grammar": (4, 4), "ngram": (9, 5)}


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize(
    ("wish", "meant"),
    [
        (None, Speculation()),
        ({}, Speculation()),
        ({"enabled": False}, Speculation(enabled=False)),
        ({"max_tokens": 0}, Speculation(max_tokens=0)),
        ({"enabled": True, "max_tokens": 3}, Speculation(max_tokens=3)),
    ],
)
async def test_the_engine_gets_what_a_request_says_of_drafts(http, engine, url, wish, meant):
    answer = await http.post(url, json=BODIES[url] | {"speculation": wish})
    assert answer.status_code == 200, answer.text
    assert engine.requests[0].speculation == meant


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize(
    ("wish", "field", "reason"),
    [
        ({"max_tokens": -1}, "speculation.max_tokens", "must be at least 0"),
        ({"max_tokens": 2.5}, "speculation.max_tokens", "a valid integer"),
        ({"max_tokens": True}, "speculation.max_tokens", "a valid integer"),
        ({"enabled": "yes"}, "speculation.enabled", "a valid boolean"),
        ({"method": "ngram"}, "speculation.method", "there is no such field"),
        ("off", "speculation", "should be an object (got a string)"),
        (False, "speculation", "should be an object (got a boolean)"),
    ],
)
async def test_a_bad_wish_is_refused_by_its_field(http, engine, url, wish, field, reason):
    answer = await http.post(url, json=BODIES[url] | {"speculation": wish})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert field in error["message"]
    assert reason in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize("url", BODIES)
async def test_usage_counts_drafts_of_all_answers_streamed_or_not(http, engine, url):
    engine.drafts = DRAFTS
    body = BODIES[url] | {"n": 2, "max_tokens": 20}
    whole = (await http.post(url, json=body)).json()["usage"]
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    streamed = sse_events((await http.post(url, json=asked)).content)[-2]["usage"]
    for usage in (whole, streamed):
        assert usage["completion_tokens"] == 40
        assert usage["completion_tokens_details"] == {
            "reasoning_tokens": 0,
            "forced_tokens": 8,
            "speculation": {
                "drafted_tokens": 26,
                "accepted_tokens": 18,
                "by_source": {
                    "grammar": {"drafted": 8, "accepted": 8},
                    "ngram": {"drafted": 18, "accepted": 10},
                },
            },
        }


async def test_usage_is_silent_where_nothing_was_drafted(http):
    usage = (await http.post(TEXT, json=BODIES[TEXT])).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0, "forced_tokens": 0}


async def test_openais_client_asks_and_reads(app, engine):
    engine.drafts = DRAFTS
    async with openai_client(app) as client:
        answer = await client.chat.completions.create(
            model="fake-model",
            messages=MESSAGES,
            extra_body={"speculation": {"max_tokens": 2}},
        )
    details = answer.usage.completion_tokens_details
    assert details.speculation["by_source"]["ngram"] == {"drafted": 9, "accepted": 5}
    assert details.forced_tokens == 4
    assert engine.requests[0].speculation.max_tokens == 2


async def test_metrics_tell_of_drafts_under_vllms_names_and_ours(http, engine):
    engine.stats = Stats(
        drafts={"grammar": (4, 4), "ngram": (9, 5)},
        draft_cuts={"ngram": (2, 7)},
        accepted_by_position=(6, 3),
        num_draft_runs=8,
        draft_seconds={"ngram": 0.5, "budget": 0.25},
        steps_by_drafts=(20, 3, *[0] * (len(ROW_CLASSES) - 2), 1),
        undrafted={"budget": 5, "nothing_found": 30},
        foreseen_over_taken=0.75,
    )
    text = (await http.get("/metrics")).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def value(name, **labels):
        labels |= {"engine": "0", "model_name": "fake-model"}
        (found,) = [s.value for s in samples if (s.name, s.labels) == (name, labels)]
        return found

    assert value("vllm:spec_decode_num_drafts_total") == 8
    assert value("vllm:spec_decode_num_draft_tokens_total") == 13
    assert value("vllm:spec_decode_num_accepted_tokens_total") == 9
    by_place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(by_place, position=p) for p in ("0", "1")] == [6, 3]
    outcomes = {"accepted": 5, "rejected": 4, "cut_grammar": 2, "cut_budget": 7}
    for outcome, num in outcomes.items():
        assert value("plait:draft_tokens_total", source="ngram", outcome=outcome) == num
    assert value("plait:draft_tokens_total", source="grammar", outcome="rejected") == 0
    assert value("plait:draft_seconds_total", source="budget") == 0.25
    assert value("plait:speculation_off_total", reason="nothing_found") == 30
    steps = {"0": 20, "1": 23, "128": 23, "+Inf": 24}
    assert {le: value("plait:budget_rows_bucket", le=le) for le in steps} == steps
    assert (value("plait:budget_rows_count"), value("plait:budget_rows_sum")) == (24, 13)
    assert value("plait:budget_predicted_over_measured") == 0.75


async def test_an_engine_that_drafts_nothing_has_empty_counters(http):
    text = (await http.get("/metrics")).text
    assert "vllm:spec_decode_num_drafts_total{" in text
    assert "plait:budget_rows" not in text
    assert "plait:budget_predicted_over_measured" not in text
