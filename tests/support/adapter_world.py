"""A scheduler whose sequences bring adapters, over a real pool with loads that run when told to."""

import random

from support.fake_adapters import AdapterFiles, FakePlaces, ManualThreads
from support.scheduler_world import World
from support.schedulers import make_scheduler

from plait.adapters.loader import Loader
from plait.adapters.pool import AdapterPool
from plait.adapters.strand import AdapterStrand

DEVICE, HOST, DRAIN_S = 24, 70, 2.0


class AdapterWorld(World):
    """A scheduler whose sequences bring adapters, and everything that can be seen of these."""

    def __init__(self, root, **config):
        self.files, self.places = AdapterFiles(root), FakePlaces()
        self.loads, self.placings = ManualThreads(), ManualThreads()
        self.pool = AdapterPool(
            self.places,
            self.files.load,
            device_bytes=DEVICE,
            host_bytes=HOST,
            loader=Loader(load_threads=self.loads, place_threads=self.placings),
        )
        self.strand = AdapterStrand(self.pool, drain_s=DRAIN_S)
        super().__init__(make_scheduler((None, 40), strands=(self.strand,), **config))
        self.refusals = {"lora_device_load_failed", "lora_storage_unavailable"}
        self.rng = random.Random(1)

    def execute(self, plan):
        for span in plan.spans:
            for use in span.sequence.request.adapters:
                assert use.generation in self.places.placed, "a row without its adapter"
        super().execute(plan)

    def between_steps(self):
        """Loads go on, and so does time."""
        self.now_s += 0.25
        for threads in (self.loads, self.placings):
            if threads.jobs:
                threads.run(self.rng.randrange(len(threads.jobs)))

    def check_memory(self):
        self.pool.check_integrity()
        known = self.pool.known
        assert set(self.places.placed) >= {g for g, held in known.items() if held.is_placed}
        assert self.places.num_bytes <= self.pool.tiers.device_bytes <= DEVICE
