"""The paged KV cache: who holds which block, under which content key, and the page tensors.

`pool` counts references and finds blocks by content, `hashing` names content, `prefix` finds the
longest one. `tables` keeps the block tables of sequences over all KV groups; `allocator` takes
blocks for them, as a `reservation`, if need be from `donors`. These know no torch. `pages` owns the
tensors.
"""
