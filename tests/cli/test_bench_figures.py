"""The arithmetic of the benchmarks, on fixed inputs."""

import itertools
import math

import numpy as np
import pytest

from plait.platform.bench.copying import copying_texts
from plait.platform.bench.latency import Trace
from plait.platform.bench.latency import figures as latency_figures
from plait.platform.bench.load import Sample
from plait.platform.bench.report import write_json
from plait.platform.bench.serving import Round, compare, meets, parse_goals, report
from plait.platform.bench.speculation import CountingRunner, Workload, table
from plait.platform.bench.speculation import measure as measure_speculation
from plait.platform.bench.stats import median, percentile, ratio, ratio_in_turns, summary
from plait.platform.bench.throughput import Plan, measure
from plait.platform.bench.timing import StepClock, Timing
from plait.platform.bench.workload import Shape, arrivals, random_token_prompts
from plait.platform.errors import ConfigError
from plait.platform.messages import Stats


@pytest.mark.parametrize("size", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 100])
def test_percentiles_are_numpys(size, percent):
    values = np.random.default_rng(size).exponential(size=size).tolist()
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_nothing_measured_is_not_zero():
    assert math.isnan(median([]))
    assert math.isnan(summary([])["p99"])
    assert math.isnan(ratio([1.0], []))


def test_a_ratio_is_of_medians():
    assert ratio([100.0, 4.0, 6.0], [2.0, 1.0, 30.0]) == 3.0


def test_of_measurements_in_turns_a_ratio_is_of_pairs():
    # The machine halved its clock after the first pair: both were as fast all along.
    assert ratio_in_turns([8.0, 4.0, 2.0], [8.0, 4.0, 2.0]) == 1.0
    assert ratio_in_turns([100.0, 4.0, 6.0], [2.0, 1.0, 30.0]) == 4.0
    assert math.isnan(ratio_in_turns([], []))
    assert math.isnan(ratio_in_turns([1.0, 1.0], [1.0, 0.0]))


def test_the_clock_splits_prefill_from_decode():
    # Two sequences; the second gets its first token only in step 3.
    clock = StepClock(2, 20, start_s=10.0)
    for now, tokens in [(11.0, {0: 1}), (12.0, {0: 1}), (13.0, {0: 1, 1: 1})]:
        for sequence, count in tokens.items():
            clock.tokens(sequence, count, now)
    for now in (14.0, 15.0):
        clock.tokens(1, 1, now)
        clock.tokens(0, 1, now)
    timing = clock.timing()
    assert timing == Timing(
        total_s=5.0, prefill_s=3.0, num_prompt_tokens=20, num_output_tokens=8, num_decode_tokens=4
    )
    assert timing.decode_rate == 2.0
    assert timing.output_rate == 1.6


def test_the_order_within_the_last_prefill_step_does_not_matter():
    timings = []
    for order in itertools.permutations([0, 1]):
        clock = StepClock(2, 2, start_s=0.0)
        clock.tokens(0, 1, 1.0)
        for sequence in order:
            clock.tokens(sequence, 1, 2.0)
        clock.tokens(0, 1, 3.0)
        timings.append(clock.timing())
    assert timings[0] == timings[1]
    assert timings[0].num_decode_tokens == 1


def test_a_sequence_that_never_answered_is_an_error():
    clock = StepClock(2, 2, start_s=0.0)
    clock.tokens(0, 1, 1.0)
    with pytest.raises(RuntimeError, match="1 sequences never"):
        clock.timing()


class FakeRunner:
    def __init__(self, name: str, seconds: float, log: list) -> None:
        self.name, self._seconds, self._log = name, seconds, log

    def run(self, prompts, output_tokens) -> Timing:
        self._log.append((self.name, tuple(map(tuple, prompts)), output_tokens))
        size = len(prompts)
        return Timing(
            total_s=1 + self._seconds * output_tokens,
            prefill_s=1,
            num_prompt_tokens=sum(map(len, prompts)),
            num_output_tokens=size * output_tokens,
            num_decode_tokens=size * (output_tokens - 1),
        )


def prompts(shape: Shape, seed: int) -> list[list[int]]:
    return random_token_prompts(shape, vocab_size=50, avoid=(3, 4), seed=seed)


def test_runners_take_turns_on_the_same_prompts():
    log: list = []
    runners = [FakeRunner("ours", 0.5, log), FakeRunner("theirs", 1.0, log)]
    plan = Plan(batch_sizes=(1, 4), input_tokens=6, output_tokens=9, repeats=3)
    results = measure(plan, runners, prompts, lambda _: None)
    measured = log[2:8]  # batch size 1, behind two warm-ups
    assert [name for name, _, _ in measured] == [
        "ours",
        "theirs",
        "theirs",
        "ours",
        "ours",
        "theirs",
    ]
    asked = [p for _, p, _ in measured]
    assert asked[0] == asked[1] != asked[2] == asked[3] != asked[4] == asked[5]
    assert not {3, 4} & {token for p in asked for row in p for token in row}
    assert [r["batch_size"] for r in results] == [1, 4]
    assert results[1]["ratios"]["theirs"]["decode_rate"] == pytest.approx(2.0)
    assert results[1]["runners"]["ours"]["decode_rate"] == pytest.approx(4 * 8 / 4.5)


def test_drafts_are_compared_with_none_and_counted_without_the_warm_up():
    log: list = []

    def stats() -> Stats:
        num_runs = sum(name == "drafts" for name, _, _ in log)
        verified = {"ngram": (10 * num_runs, 6 * num_runs), "suffix": (0, 0)}
        return Stats(num_draft_runs=4 * num_runs, drafts=verified)

    runners = tuple(
        CountingRunner(FakeRunner(name, seconds, log), stats)
        for name, seconds in (("drafts", 0.25), ("none", 1.0))
    )
    workloads = [
        Workload(name=name, prompts=prompts, runners=runners) for name in ("random", "copying")
    ]
    plan = Plan(batch_sizes=(1, 2), input_tokens=6, output_tokens=9, repeats=3)
    results = measure_speculation(plan, workloads, lambda _: None)
    assert [(r["workload"], r["batch_size"]) for r in results] == [
        *(("random", 1), ("random", 2)),
        *(("copying", 1), ("copying", 2)),
    ]
    for result in results:
        assert result["ratios"]["none"]["decode_rate"] == pytest.approx(4.0)
        assert result["drafts"] == {"ngram": {"verified": 30, "accepted": 18}}
        assert result["acceptance_length"] == pytest.approx(2.5)
    assert table(results).row_count == 4


def test_prompts_to_copy_from_are_long_enough_and_all_different():
    shape = Shape(batch_size=32, input_tokens=40, output_tokens=64)
    texts = copying_texts(shape, lambda text: len(text.split()), seed=1)
    assert len(set(texts)) == 32
    assert texts == copying_texts(shape, lambda text: len(text.split()), seed=1)
    for text in texts:
        task, _, source = text.partition("\n\n")
        assert len(source.split()) >= 64
        assert task.startswith(("Repeat this text", "Write these people as a JSON"))


def test_latency_of_known_moments():
    figures = latency_figures([Trace(times_s=(0.5, 0.6, 0.8)), Trace(times_s=(1.5, 1.6, 1.8))])
    assert figures["ttft_ms"]["mean"] == pytest.approx(1000)
    assert figures["itl_ms"]["mean"] == pytest.approx(150)
    assert figures["tokens_per_s"]["p50"] == pytest.approx(2 / 0.3)


def sample(**fields) -> Sample:
    defaults = {"ttft_s": 0.1, "e2e_s": 1.1, "num_output_tokens": 11, "num_prompt_tokens": 5}
    return Sample(**defaults | fields)


def test_errors_count_as_errors_and_nothing_else():
    rounds = [Round(samples=[sample(gaps_s=[0.1] * 10), Sample(error="503: full")], seconds=2.0)]
    figures = report(rounds, {"ttft": 0.2})
    assert (figures["requests"], figures["errors"]) == (2, 1)
    assert figures["requests_per_s"] == 0.5
    assert figures["output_tokens_per_s"] == 5.5
    assert figures["goodput_per_s"] == 0.5
    assert figures["tpot_ms"]["p50"] == pytest.approx(100)
    assert figures["error_messages"] == {"503: full": 1}


def test_goals_are_all_to_be_met():
    goals = parse_goals(["ttft:100", "tpot:150"])
    assert goals == {"ttft": 0.1, "tpot": 0.15}
    assert meets(sample(), goals)
    assert not meets(sample(ttft_s=0.11), goals)
    assert not meets(sample(e2e_s=2.0), goals)
    assert not meets(sample(error="x"), goals)


@pytest.mark.parametrize("text", ["ttft", "ttft:fast", "itl:5", "5:ttft"])
def test_a_goal_must_be_known(text):
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goals([text])


def test_a_comparison_is_above_one_where_the_first_is_better():
    fast = Round(samples=[sample(ttft_s=0.1, gaps_s=[0.1])], seconds=1.0)
    slow = Round(samples=[sample(ttft_s=0.3, gaps_s=[0.2])], seconds=2.0)
    assert compare([fast], [slow]) == pytest.approx(
        {"output_tokens_per_s": 2.0, "ttft": 3.0, "itl": 2.0}
    )


def test_arrivals_have_the_rate_asked_for():
    times = list(itertools.islice(arrivals(5.0, seed=1), 5001))
    assert times[0] == 0
    assert times[-1] == pytest.approx(1000, rel=0.05)


def test_json_holds_null_where_there_is_no_figure(tmp_path):
    import json

    path = tmp_path / "r.json"
    write_json({"a": [math.nan, 1.0], "b": (math.inf,)}, str(path))
    assert json.loads(path.read_text()) == {"a": [None, 1.0], "b": [None]}
