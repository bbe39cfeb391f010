"""The operations a model is made of, one file each.

A file holds the contract, a plain torch reference, a maker of inputs, the tolerance with its
reason, and the choice of implementation: the C++ kernel on a CPU, the reference elsewhere or where
the library is not built. Rows never influence each other: in a kernel, a row's bits are the same
alone and in any batch.

    op                file                 kernels
    kv_write          kv_write.py          csrc/kv_write.*
    paged_attention   paged_attention.py   csrc/paged_attention*
    linear            linear.py            csrc/linear*
    quantized_linear  quantized_linear.py  csrc/quant*, weights in quantized_weight.py
    gumbel_argmax     gumbel_argmax.py     csrc/gumbel*
    rms_norm          rms_norm.py          csrc/rms_norm*
    gated_activation  gated_activation.py  csrc/gated_activation*
    activation        activation.py        csrc/activation*
    varlen_attention  varlen_attention.py  csrc/varlen_attention*
    lora              lora.py              csrc/lora*, weights in lora_weights.py
    token_mask        token_mask.py        csrc/token_mask*
    likeliest         likeliest.py         csrc/likeliest*

Suffixes and symbols of shapes, the same everywhere:

    T    rows (tokens) of a step           S    spans of a step
    R    rows whose logits are wanted      V    vocabulary
    Hq   query heads                       Hkv  KV heads; H where either is meant
    D    size of a head, or of a row       L    layers of a KV group
    K    inputs of a linear layer          N    outputs of a linear layer
    B    blocks in a block table's row
"""
