"""The backend "ddp" of torch.distributed: PyTorch's collectives, DDP and FSDP over libddp.

    torch.distributed.init_process_group("ddp")

PyTorch finds it by itself once the package is installed; `import ddp_torch` registers it too.
"""

import torch
import torch.distributed as dist

from . import _C  # after torch, whose libraries it needs

__all__ = []


def _create(store, rank, size, timeout):
    return _C.create(store, rank, size, timeout)


def _register():
    if dist.is_available() and not hasattr(dist.Backend, "DDP"):
        dist.Backend.register_backend("ddp", _create, devices=["cpu", "cuda"])


def _autoload():
    """PyTorch calls it when it is imported."""


_register()
