"""Tests of the compiler passes."""

import torch
import torch.distributed._functional_collectives as funcol
from torch._dynamo import trace_rules

# torch 2.12 gathers along dimensions other than 0 with a function that its Dynamo does not trace.
_NAME = "_maybe_view_chunk_cat"
if hasattr(funcol, _NAME) and f"torch._utils.{_NAME}" not in trace_rules.manual_torch_name_rule_map:
    setattr(funcol, _NAME, torch._dynamo.dont_skip_tracing(getattr(funcol, _NAME)))
