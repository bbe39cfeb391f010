"""Loading checkpoints and running them.

`load_model(options)` gives an executor, `check_model(options)` says whether it would. In reading
order: loading → source (where files are) → build (transformers' class, our leaves) → probe (what
its layers ask for) → weights (filling it) → executor (running it) → warm_start (what a later start
does instead). Adapters: sites (what they can change) → placement and tables (making one ready) →
adapters (whose rows a step has) → adapter_step (what leaves, experts, embedding and head do about
it).
"""

from plait.platform.model.loaded import LoadedModel, SupportReport
from plait.platform.model.loading import check_model, load_model

__all__ = ["LoadedModel", "SupportReport", "check_model", "load_model"]
