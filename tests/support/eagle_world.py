"""What an engine does with an EAGLE head and nothing else, and the reference beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.eagle_heads import HeadShape, ReferenceHead, head_tensors, write_head
from support.tiny_models import VOCAB_SIZE, make_checkpoint, make_model

from plait.platform.batch import build
from plait.platform.config import CacheConfig, Options, SchedulerConfig
from plait.platform.core import Request, SamplingParams, SequenceState
from plait.platform.model import load_model
from plait.platform.sampling import Sampler
from plait.platform.scheduler import Scheduler
from plait.speculative.eagle import EagleSource, HeadBounds
from plait.speculative.eagle_head import load_head
from plait.speculative.source import Want

NUM_LAYERS = 5
BLOCK_SIZE = 4
NUM_SCRATCH = 24
PROMPTS = ([5, 9, 31], list(range(40, 51)), [7], [200, 3, 3, 17, 90, 12, 250, 41], [60] * 25)


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

    def propose(self, limit=4, after=(), **more):
        """Drafts for every sequence that lacks one token, by sequence."""
        lacking = self.lacking_one()
        wants = [Want(sequence=s, limit=limit, after=after, **more) for s in lacking]
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
