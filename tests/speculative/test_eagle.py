"""EAGLE heads against plain fp64 torch, under a real target, scheduler and sampler."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.eagle_heads import HeadShape, ReferenceHead, head_tensors, write_head
from support.tiny_models import VOCAB_SIZE, make_checkpoint, make_model

from plait.platform.batch import build
from plait.platform.config import CacheConfig, Options, SchedulerConfig
from plait.platform.core import AdapterUse, Request, SamplingParams, SequenceState, Speculation
from plait.platform.errors import ConfigError, ModelUnsupported
from plait.platform.head_loading import find_head, load_drafting_head
from plait.platform.model import load_model
from plait.platform.sampling import Sampler
from plait.platform.scheduler import Scheduler
from plait.speculative.eagle import EagleSource, HeadBounds
from plait.speculative.eagle_config import is_head, read_head_config
from plait.speculative.eagle_head import load_head
from plait.speculative.eagle_weights import Kept
from plait.speculative.source import Want

NUM_LAYERS = 5
BLOCK_SIZE = 4
NUM_SCRATCH = 24
PROMPTS = ([5, 9, 31], list(range(40, 51)), [7], [200, 3, 3, 17, 90, 12, 250, 41], [60] * 25)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A loaded model without pages, and transformers' own in fp64."""
    return load_target(tmp_path_factory.mktemp("target"))


def load_target(path, **options):
    fields = {"seed": 3, "num_hidden_layers": NUM_LAYERS}
    directory = make_checkpoint("llama", path, **fields)
    loaded = load_model(Options(model=str(directory), dtype="float32", progress=False, **options))
    return loaded.executor, make_model("llama", **fields).double()


def make_head(path, shape=None, seed=1):
    shape = shape or HeadShape()
    tensors = head_tensors(shape, seed)
    return write_head(path, shape, tensors), shape, tensors


def greedy(_sequence, _drafts, row, *, masked):
    assert not masked
    return int(row.argmax())


class World:
    """What an engine does with a head, and nothing else."""

    def __init__(self, target, head, *, num_blocks=64, rows=16, caching=True, **source):
        self.executor, self.peer = target
        groups = tuple(replace(g, num_blocks=num_blocks) for g in self.executor.kv_groups)
        cache = CacheConfig(
            block_size=BLOCK_SIZE, groups=groups, dtype="float32", enable_prefix_caching=caching
        )
        bounds = SchedulerConfig(
            max_model_len=200, max_num_seqs=8, max_num_batched_tokens=rows, max_num_queued=100
        )
        self.executor.allocate(cache)
        self.scheduler = Scheduler(bounds, cache, ())
        self.sampler = Sampler(VOCAB_SIZE, ())
        source.setdefault("choose", greedy)
        loaded = load_head(head, self.executor)
        loaded.allocate(num_blocks + NUM_SCRATCH, BLOCK_SIZE)
        self.source = EagleSource(
            loaded,
            HeadBounds(
                block_size=BLOCK_SIZE,
                group=0,
                num_blocks=num_blocks,
                num_scratch=NUM_SCRATCH,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=(),
            ),
            **source,
        )
        self.unfinished = []
        self.steps_tapped = []

    def add(self, prompt, max_tokens=8, request_id=None, **fields):
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=fields.pop("temperature", 0.0),
            n=fields.pop("n", 1),
            ignore_eos=True,
        )
        request = Request(
            request_id=request_id or f"r{len(self.unfinished)}-{self.scheduler._step_id}",
            prompt_token_ids=tuple(prompt),
            params=params,
            **fields,
        )
        end = len(prompt) + max_tokens
        self.unfinished += self.scheduler.add(request, seed=11, max_total_tokens=end)
        return self.unfinished[-1]

    def lacking_one(self):
        running = [s for s in self.unfinished if s.state is SequenceState.RUNNING]
        return [s for s in running if len(s.tokens) - s.num_computed_tokens == 1]

    def propose(self, limit=4, after=()):
        """Drafts for every sequence that lacks one token, by sequence."""
        lacking = self.lacking_one()
        wants = [Want(sequence=s, limit=limit, after=after) for s in lacking]
        drafts = self.source.propose(wants)
        return {s.seq_id: (s, draft) for s, draft in zip(lacking, drafts, strict=True)}

    def step(self):
        plan = self.scheduler.plan(0.0)
        batch = build(plan, BLOCK_SIZE)
        taps = None
        if self.source.wants_taps(plan):
            hidden, taps = self.executor.forward_tapped(batch, self.source.taps)
        else:
            hidden = self.executor.forward(batch)
        self.steps_tapped.append(taps is not None)
        result = self.sampler.sample(plan, batch, hidden, self.executor)
        self.source.ingest(plan, batch, taps, result)
        self.scheduler.commit(plan, result, lambda _sequence, _token: None)
        for sequence in [s for s in self.unfinished if s.finish_reason is not None]:
            self.source.release(sequence)
            self.unfinished.remove(sequence)
        self.source.check_integrity(self.unfinished)
        return plan

    def run(self, check, limit=4, drafts=None, after=()):
        """Run to the end; `check` sees every proposal, `drafts` says what is verified instead."""
        num_checked = 0
        while self.unfinished:
            for sequence, draft in self.propose(limit, after).values():
                num_checked += check(sequence, draft)
                room = sequence.max_total_tokens - len(sequence.tokens) - 1
                chosen = drafts(sequence) if drafts else (draft.tokens if draft else ())
                sequence.drafts[:] = list(chosen)[:room]
            self.step()
        return num_checked

    @torch.no_grad()
    def taps_of(self, tokens):
        """The peer's rows between its layers, fp64."""
        out = self.peer(torch.tensor([tokens]), output_hidden_states=True)
        rows = [out.hidden_states[tap][0] for tap in self.source.taps]
        assert max(self.source.taps) < NUM_LAYERS, "the last one is behind the norm"
        return torch.cat(rows, dim=-1)

    @torch.no_grad()
    def truth(self, tokens, count):
        """What the target says next, greedily."""
        tokens = list(tokens)
        for _ in range(count):
            logits = self.peer(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
        return tokens[-count:]


def comparison(world, shape, tensors, limit=4, after=()):
    """A check that each draft is the reference's greedy chain, with its probabilities."""
    embeddings = world.peer.get_input_embeddings().weight.detach()
    reference = ReferenceHead(shape, tensors, embeddings)

    def check(sequence, draft):
        tokens = list(sequence.tokens)
        rows = reference.chain(world.taps_of(tokens)[:-1], tokens, limit)
        assert draft is not None
        assert draft.source == "eagle"
        assert draft.tokens == tuple(int(row.argmax()) for row in rows)
        wanted = [float(row.softmax(-1).max()) for row in rows]
        assert draft.chances == pytest.approx(wanted, rel=1e-4)
        return 1

    return check


SHAPES = {
    "original": HeadShape(),
    "speculators": HeadShape(form="speculators", norm_before_residual=True),
    "whole vocabulary": HeadShape(draft_vocab_size=VOCAB_SIZE),
    "the target's embeddings": HeadShape(
        form="speculators", own_embeddings=False, taps=(1, 3), num_taps=2
    ),
    "norm before fc, usual taps": HeadShape(norm_before_fc=True, taps=None),
    "qwen3 with biases, low tap": HeadShape(
        form="speculators", model_type="qwen3", attention_bias=True, taps=(0, 2, 4)
    ),
    "another width": HeadShape(hidden_size=48, head_size=12, norm_before_residual=True),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_drafts_are_the_reference_s_greedy_chain(shape, target, tmp_path):
    path, _, tensors = make_head(tmp_path, shape)
    world = World(target, path)
    for prompt in PROMPTS:
        world.add(prompt)
    check = comparison(world, shape, tensors)
    assert world.run(check) >= 20
    assert world.source.figures["faults"] == 0


def test_a_head_without_logit_rows_has_the_model_s(target, tmp_path):
    shape = HeadShape()
    tensors = head_tensors(shape, 1)
    known = tensors["d2t"] + torch.arange(shape.draft_vocab_size)
    own = tensors.pop("lm_head.weight")
    path = write_head(tmp_path, shape, tensors)
    rows = target[1].lm_head.weight.detach()[known].float()
    assert rows.shape == own.shape
    world = World(target, path)
    for prompt in PROMPTS:
        world.add(prompt)
    check = comparison(world, shape, {**tensors, "lm_head.weight": rows})
    assert world.run(check) >= 20


@pytest.mark.parametrize(("bits", "error"), [(8, 0.02), (4, 0.25)])
def test_matrices_of_a_head_can_be_kept_as_codes(bits, error, target, tmp_path):
    path, shape, _ = make_head(tmp_path)
    heads = [load_head(path, target[0], kept) for kept in (Kept(), Kept(bits=bits))]
    rows = torch.randn(9, shape.hidden_size, generator=torch.Generator().manual_seed(1))
    exact, near = (head.logits(rows) for head in heads)
    assert 0 < (near - exact).norm() / exact.norm() < error
    assert heads[1].weight_bytes < heads[0].weight_bytes


def test_a_head_is_kept_as_the_model_is(target, tmp_path):
    path, *_ = make_head(tmp_path)
    sizes = {}
    for quantization in ("auto", "int8"):
        options = Options(model="x", draft_model=str(path), quantization=quantization)
        sizes[quantization] = load_drafting_head(path, options, target[0]).sizes.weight_bytes
    assert sizes["int8"] == sizes["auto"], "the options are what the model was loaded with"
    (tmp_path / "target").mkdir()
    executor, _ = load_target(tmp_path / "target", quantization="int8")
    loaded = load_drafting_head(path, Options(model="x", draft_model=str(path)), executor)
    assert loaded.sizes.weight_bytes < 0.6 * sizes["auto"]


def test_drafts_are_right_after_accepted_and_rejected_ones(target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path)
    truths = {}
    for prompt in PROMPTS:
        sequence = world.add(prompt, max_tokens=14)
        truths[sequence.seq_id] = world.truth(prompt, 14)

    def drafts(sequence):
        """So many right ones, then a wrong one."""
        done = sequence.num_output_tokens
        right = truths[sequence.seq_id][done : done + (3 * done + sequence.seq_id) % 4]
        return [*right, 1, 1]

    sequences = list(world.unfinished)
    assert world.run(comparison(world, shape, tensors), drafts=drafts) >= 20
    for sequence in sequences:
        assert sequence.output_token_ids == truths[sequence.seq_id]
        assert 0 < sequence.num_accepted_tokens < sequence.num_draft_tokens


def test_a_draft_goes_on_behind_that_of_others(target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path)
    world.add(PROMPTS[1])
    while not world.lacking_one():
        world.step()
    ((sequence, whole),) = world.propose(6).values()
    ((_, rest),) = world.propose(4, after=whole.tokens[:2]).values()
    assert rest.tokens == whole.tokens[2:]
    assert rest.chances == pytest.approx(whole.chances[2:])
    ((_, other),) = world.propose(2, after=(300, 301)).values()
    assert other.tokens != rest.tokens[:2]
    tokens = list(sequence.tokens)
    reference = ReferenceHead(shape, tensors, torch.zeros(1))
    again = reference.chain(world.taps_of(tokens)[:-1], tokens, 6)
    assert whole.tokens == tuple(int(row.argmax()) for row in again)


def test_a_cached_prefix_that_the_head_saw_gives_the_same_drafts(target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path)
    check = comparison(world, shape, tensors)
    first = world.add(PROMPTS[4], max_tokens=6)
    world.run(check)
    again = world.add([*first.tokens, 9, 8, 7], max_tokens=6)
    assert world.run(check) >= 2
    assert again.num_cached_tokens >= len(PROMPTS[4])
    assert world.source.figures["unseen_sequences"] == 0


def test_siblings_share_what_their_leader_saw(target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path)
    world.add(PROMPTS[4], n=3)
    assert world.run(comparison(world, shape, tensors)) >= 12
    assert world.source.figures["unseen_sequences"] == 0


def test_a_cached_prefix_that_the_head_did_not_see_gives_no_drafts(target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path, follows=lambda s: s.request.speculation.enabled)
    off = Speculation(enabled=False)
    silent = world.add(PROMPTS[4], speculation=off)
    world.run(lambda _sequence, draft: draft is not None and pytest.fail("not followed"))
    assert not any(world.steps_tapped)
    again = world.add(PROMPTS[4])
    other = world.add(PROMPTS[3])
    check = comparison(world, shape, tensors)

    def per_sequence(sequence, draft):
        assert world.source.takes(sequence) == (draft is not None)
        return (draft is None) if sequence is again else check(sequence, draft)

    assert world.run(per_sequence) >= 8
    assert again.num_cached_tokens > 0
    assert again.output_token_ids == silent.output_token_ids
    assert other.output_token_ids == world.truth(PROMPTS[3], 8)
    assert world.source.figures["unseen_sequences"] == 1


def test_blocks_reused_by_a_sequence_that_is_not_followed_count_as_unseen(target, tmp_path):
    path, *_ = make_head(tmp_path)
    world = World(target, path, num_blocks=12, follows=lambda s: s.request.speculation.enabled)
    world.add(PROMPTS[4])
    world.run(lambda *_: 0)
    # The same text without the head, in a world so small that blocks are taken anew.
    world.add([1, *range(100, 130)], speculation=Speculation(enabled=False))
    world.run(lambda *_: 0)
    world.add(PROMPTS[4], speculation=Speculation(enabled=False))
    world.run(lambda *_: 0)
    world.add(PROMPTS[4])
    assert world.run(lambda _sequence, draft: draft is None) > 0
    assert world.source.figures["unseen_sequences"] == 1


def test_prefixes_are_told_apart_by_adapters(target, tmp_path):
    """Also by those that change no K and V: they can still change what is tapped."""
    path, *_ = make_head(tmp_path)
    world = World(target, path)
    blocks = world.source._blocks
    plan_of = []
    world.add(PROMPTS[4])
    while world.unfinished:
        plan_of.append(world.step())
    first = next(span for plan in plan_of for span in plan.spans)
    use = AdapterUse(generation="ab" * 32)
    request = replace(first.sequence.request, adapters=(use,))
    sequence = replace(first.sequence, seq_id=77, request=request)
    span = replace(plan_of[1].spans[0], sequence=sequence)
    assert not blocks.begin(span, is_wanted=True).is_followed
    plain = replace(first.sequence, seq_id=78)
    del blocks._states[77]
    assert span.start > 0
    span = replace(span, start=4, num_tokens=4, sequence=plain)
    assert blocks.begin(span, is_wanted=True).is_followed


def test_a_preempted_sequence_is_followed_again(target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path, num_blocks=20, caching=True)
    for prompt in (PROMPTS[4], PROMPTS[1], [*PROMPTS[4], 3]):
        world.add(prompt, max_tokens=20)
    sequences = list(world.unfinished)
    check = comparison(world, shape, tensors)

    def seen(sequence, draft):
        return 0 if draft is None else check(sequence, draft)

    assert world.run(seen, limit=4) >= 30
    assert sum(s.num_preemptions for s in sequences) > 0
    for sequence in sequences:
        prompt = list(sequence.request.prompt_token_ids)
        assert sequence.output_token_ids == world.truth(prompt, 20)


def test_a_row_s_drafts_do_not_depend_on_its_neighbours(target, tmp_path):
    path, *_ = make_head(tmp_path)
    kept = []

    def keep(sequence, draft):
        key = sequence.request.request_id, sequence.num_output_tokens
        kept.append((key, draft.tokens, draft.chances))
        return 1

    together = World(target, path, rows=64)
    for i, prompt in enumerate(PROMPTS):
        together.add(prompt, request_id=f"p{i}")
    together.run(keep)
    mixed, kept[:] = sorted(kept), []
    for i, prompt in enumerate(PROMPTS):
        alone = World(target, path, rows=16)
        alone.add(prompt, request_id=f"p{i}")
        alone.run(keep)
    assert sorted(kept) == mixed  # to the last bit


def test_sampled_drafts_are_chosen_as_the_target_chooses(target, tmp_path):
    """With the sampler's own noise of each position, at the request's temperature."""
    path, shape, tensors = make_head(tmp_path)
    sampler = Sampler(VOCAB_SIZE, ())
    world = World(target, path, choose=sampler.choose)
    reference = ReferenceHead(shape, tensors, torch.zeros(1))
    world.add(PROMPTS[3], temperature=0.8)
    world.add(PROMPTS[1], temperature=1.5)
    greedy_too = []

    def check(sequence, draft):
        def choose(drafts, row):
            return sampler.choose(sequence, drafts, row.float().numpy())

        tokens = list(sequence.tokens)
        rows = reference.chain(world.taps_of(tokens)[:-1], tokens, 4, choose)
        wanted = [choose(draft.tokens[:i], row) for i, row in enumerate(rows)]
        assert draft.tokens == tuple(wanted)
        scale = sequence.request.params.temperature
        chances = [float((r / scale).softmax(-1)[t]) for r, t in zip(rows, wanted, strict=True)]
        assert draft.chances == pytest.approx(chances, rel=1e-4)
        greedy_too.append(wanted == [int(row.argmax()) for row in rows])
        return 1

    assert world.run(check) >= 10
    assert not all(greedy_too)


def test_a_mask_forbids_and_ends_chains(target, tmp_path):
    path, *_ = make_head(tmp_path)
    seen = []

    def mask(_sequence, drafts, row):
        seen.append(drafts)
        row[np.arange(VOCAB_SIZE) % 2 == 0] = -np.inf
        return len(drafts) < 2

    world = World(
        target, path, mask=mask, choose=lambda _s, _d, row, masked: int(row.argmax()) * masked
    )
    sequence = world.add(PROMPTS[1])
    while not world.lacking_one():
        world.step()
    sequence.request = replace(sequence.request, grammar=object())
    ((_, draft),) = world.propose(4).values()
    assert len(draft.tokens) == 2
    assert all(token % 2 == 1 for token in draft.tokens)
    assert seen == [(), draft.tokens[:1], draft.tokens]
    world.source._mask = lambda _s, _d, row: row.fill(-np.inf) or True
    ((_, draft),) = world.propose(4).values()
    assert draft is None


def test_chains_end_at_end_tokens_and_below_the_floor(target, tmp_path):
    path, *_ = make_head(tmp_path)
    world = World(target, path)
    world.add(PROMPTS[1])
    while not world.lacking_one():
        world.step()
    ((sequence, whole),) = world.propose(5).values()
    params = replace(sequence.request.params, stop_token_ids=(whole.tokens[1],))
    plain = sequence.request
    sequence.request = replace(plain, params=params)
    ((_, ended),) = world.propose(5).values()
    end = whole.tokens.index(whole.tokens[1]) + 1
    assert ended.tokens == whole.tokens[:end]
    sequence.request = plain
    world.source.floor = whole.chances[0] * whole.chances[1] * 1.01
    ((_, short),) = world.propose(5).values()
    assert short.tokens == whole.tokens[:2]


def test_a_round_without_room_is_shorter(target, tmp_path):
    path, *_ = make_head(tmp_path)
    world = World(target, path)
    world.add(PROMPTS[1], max_tokens=100)
    while not world.lacking_one():
        world.step()
    ((sequence, draft),) = world.propose(1000).values()
    table = len(sequence.block_ids[0]) + NUM_SCRATCH
    assert len(draft.tokens) == table * BLOCK_SIZE - (len(sequence.tokens) - 1) + 1


def test_a_fault_costs_drafts_and_no_request(target, tmp_path, monkeypatch):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path)
    world.add(PROMPTS[0], max_tokens=30)
    while not world.lacking_one():
        world.step()

    def broken(_rows):
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(world.source.head, "forward", broken)
        assert [draft for _, draft in world.propose().values()] == [None]
    world.add(PROMPTS[3])
    check = comparison(world, shape, tensors)
    first = world.unfinished[0]
    world.run(lambda s, draft: (draft is None) if s is first else check(s, draft))
    assert world.source.figures["faults"] == 1
    assert first.output_token_ids == world.truth(PROMPTS[0], 30)
    monkeypatch.setattr(world.source.head, "forward", broken)
    for prompt in PROMPTS[:4]:
        world.add(prompt)
        world.run(lambda _s, draft: draft is None)
    assert world.source.is_off
    world.add(PROMPTS[0])
    world.steps_tapped.clear()
    world.run(lambda _s, draft: draft is None)
    assert not any(world.steps_tapped)


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_taps_are_what_transformers_has_between_layers(kind, tmp_path):
    executor, peer = load_target(tmp_path, executor=kind)
    world_groups = tuple(replace(g, num_blocks=8) for g in executor.kv_groups)
    executor.allocate(
        CacheConfig(block_size=4, groups=world_groups, dtype="float32", enable_prefix_caching=False)
    )
    from support.step_driver import StepDriver, Track

    driver = StepDriver(executor)
    track = Track(tokens=PROMPTS[1][:7], num_output=1)
    batch = driver._batch([track], [7])
    plain = executor.forward(batch)
    hidden, taps = executor.forward_tapped(batch, (0, NUM_LAYERS, 2, 2))
    assert torch.equal(hidden, plain)
    last = []
    hook = peer.model.layers[-1].register_forward_hook(lambda _m, _a, out: last.append(out))
    with torch.no_grad():
        out = peer(torch.tensor([track.tokens]), output_hidden_states=True)
    hook.remove()
    middle = out.hidden_states[2][0]
    wanted = torch.cat([out.hidden_states[0][0], last[0][0], middle, middle], dim=-1)
    torch.testing.assert_close(taps.double(), wanted, rtol=1e-4, atol=1e-4)
    if kind == "torch":
        assert not any(module._forward_hooks for module in executor._backbone.layers)


# --- refusals ---------------------------------------------------------------------------------


def test_a_named_head_is_found_and_told_of(target, tmp_path):
    path, *_ = make_head(tmp_path / "a-head")
    options = Options(draft_model=str(path), block_size=BLOCK_SIZE, max_draft_tokens=6)
    assert find_head(options) == path
    loaded = load_drafting_head(path, options, target[0])
    assert loaded.group == 0
    assert loaded.sizes.weight_bytes == loaded.head.weight_bytes
    assert loaded.sizes.bytes_per_block == loaded.head.kv_group.bytes_per_block(BLOCK_SIZE, 4)
    assert loaded.notes == (
        "draft: a-head, an EAGLE-3 head on what layers 2, 3, 4 of the model are given",
        "draft: it knows 120 of 307 tokens, and drafts no others",
    )
    model = make_checkpoint("llama", tmp_path / "model", tokenizer=False)
    assert find_head(replace(options, draft_model=str(model))) is None
    with pytest.raises(ConfigError, match="--draft: there is no file or directory") as refusal:
        find_head(replace(options, draft_model=str(tmp_path / "nothing at all")))
    assert refusal.value.param == "draft_model"
    other = write_head(path, replace(HeadShape(), vocab_size=400), head_tensors(HeadShape()))
    with pytest.raises(ModelUnsupported, match="--draft: the draft head a-head was made for a"):
        load_drafting_head(other, options, target[0])


def test_only_heads_are_taken_for_heads(target, tmp_path):
    path, *_ = make_head(tmp_path / "head")
    assert is_head(path)
    assert is_head(make_head(tmp_path / "other", HeadShape(form="speculators"))[0])
    assert not is_head(make_checkpoint("llama", tmp_path / "model", tokenizer=False))
    assert not is_head(tmp_path / "nothing")


CONFIGS = {
    "EAGLE-3 alone": {"architectures": ["LlamaForCausalLMEagle"]},
    "2 layers": {"num_hidden_layers": 2},
    "layers of deepseek_v3": {"model_type": "deepseek_v3"},
    "rope scaling of type dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "activation relu": {"hidden_act": "relu"},
    "sliding_attention": {"layer_types": ["sliding_attention"]},
    "hidden rows of 128, and": {"target_hidden_size": 128},
    "a vocabulary of 300, and": {"vocab_size": 300},
    r"after 2, 3, 9 layers, and the model has 5": {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]},
    "no list of numbers": {"eagle_aux_hidden_state_layer_ids": ["a"]},
    "use_aux_hidden_state": {"eagle_config": {"use_aux_hidden_state": False}},
    r"fc.weight of shape \[64, 192\].*\[64, 128\]": {"eagle_aux_hidden_state_layer_ids": [2, 3]},
}


@pytest.mark.parametrize("words", CONFIGS)
def test_a_head_that_does_not_fit_is_refused_by_name(words, target, tmp_path):
    path, shape, _ = make_head(tmp_path / "a-head")
    (path / "config.json").write_text(json.dumps({**shape.config, **CONFIGS[words]}))
    with pytest.raises(ModelUnsupported, match=f"draft head a-head .*{words}") as refusal:
        load_head(path, target[0])
    assert refusal.value.param == "draft_model"


def _without(name):
    return lambda tensors: tensors.pop(name)


TENSORS = {
    r"lacks midlayer\.|lacks layers\.0\.hidden_norm\.weight \[64\]": _without(
        "layer.hidden_norm.weight"
    ),
    r"lacks d2t \[120\]": _without("d2t"),
    r"no place for: layers\.0\.self_attn\.q_proj\.bias": lambda t: t.update(
        {"layer.self_attn.q_proj.bias": torch.zeros(64)}
    ),
    r"midlayer\.self_attn\.k_proj\.weight of shape \[32, 64\].*\[32, 128\]": lambda t: t.update(
        {"layer.self_attn.k_proj.weight": torch.zeros(32, 64)}
    ),
    r"d2t that does not lead to 120 of 307 tokens": lambda t: (
        t["d2t"].fill_(1).sub_(torch.arange(120))
    ),
}


@pytest.mark.parametrize("words", TENSORS)
def test_weights_that_do_not_fit_are_refused_by_name(words, target, tmp_path):
    shape = HeadShape()
    tensors = head_tensors(shape)
    TENSORS[words](tensors)
    path = write_head(tmp_path / "a-head", shape, tensors)
    with pytest.raises(ModelUnsupported, match=words):
        load_head(path, target[0])


def test_a_head_of_another_width_needs_its_own_embeddings(target, tmp_path):
    shape = HeadShape(hidden_size=48, head_size=12, own_embeddings=False)
    path = write_head(tmp_path, shape, head_tensors(shape))
    with pytest.raises(ModelUnsupported, match=r"no embed_tokens\.weight of its own"):
        load_head(path, target[0])


def test_pickled_weights_are_refused(target, tmp_path):
    path, *_ = make_head(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelUnsupported, match="pickles"):
        load_head(path, target[0])


def test_layers_are_counted_as_the_form_counts_them(tmp_path):
    """On the top level after how many layers; under eagle_config, where 1 comes first, one less."""
    cases = [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, (1, 2, 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}}, (2, 3, 4)),
        ({}, None),
    ]
    for i, (fields, taps) in enumerate(cases):
        path, shape, _ = make_head(tmp_path / str(i), HeadShape(taps=None))
        (path / "config.json").write_text(json.dumps({**shape.config, **fields}))
        config = read_head_config(path)
        assert config.taps == taps
    assert config.taps_of(32) == (2, 16, 29)


def test_memory_is_told(target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    head = load_head(path, target[0])
    floats = [t.numel() for name, t in tensors.items() if t.is_floating_point()]
    pads = 8 * 64  # 120 tokens of the head in tiles of 16
    assert head.weight_bytes == 4 * (sum(floats) + pads) + 8 * shape.draft_vocab_size
    assert head.kv_group.bytes_per_block(BLOCK_SIZE, 4) == 2 * 2 * 16 * BLOCK_SIZE * 4


def test_a_truncated_file_is_refused(target, tmp_path):
    path, *_ = make_head(tmp_path)
    save_file({"x": torch.zeros(1)}, path / "model.safetensors")
    with pytest.raises(ModelUnsupported, match="lacks"):
        load_head(path, target[0])
