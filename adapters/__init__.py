"""Adapters: the PEFT format, the registry of generations, the memory pool, segments, load reports.

This part owns everything about LoRA adapters, from reading an untrusted folder to the lease that a
running sequence holds. A request's adapter is served, or the request is refused by an error that
names it; it never gets the base model's output instead.

An adapter's way: `store` copies what it is given under the hash of its content, its *generation* →
`loading` reads that copy against the model's `sites` into an `Adapter`, with a `report` → `pool`
keeps it in memory and has the executor place it → a sequence runs with it, under a lease of the
`strand`. Names live in the `registry`, in the process that answers HTTP.
"""
