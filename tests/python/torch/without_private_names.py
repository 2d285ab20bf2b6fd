"""A plugin of pytest: whet.torch as it is with a torch that lacks the private names which whet.torch looks for."""

import torch
from torch.autograd import forward_ad

NAMES = [(torch._C, "_dispatch_keys"), (torch._C, "_len_torch_dispatch_stack"), (torch._C, "_get_tracing_state"),
         (torch._C, "_are_functorch_transforms_active"), (forward_ad, "_current_level")]

# torch itself needs them, so they are missing only while whet.torch is imported.
kept = [getattr(*name) for name in NAMES]
for name in NAMES:
    delattr(*name)
try:
    import whet.torch._tensors
finally:
    for name, value in zip(NAMES, kept):
        setattr(*name, value)

assert not whet.torch._tensors.KNOWS_WHEN_TO_SKIP
