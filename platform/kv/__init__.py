"""The paged KV cache: who holds which block, under which content key, and the page tensors.

`pool` counts references and finds blocks by content, `hashing` names content, `manager` keeps
the block tables of sequences over all KV groups; these know no torch. `pages` owns the tensors.
"""
