# SPDX-License-Identifier: Apache-2.0
"""The backend "ddp" of torch.distributed: PyTorch's collectives, DDP and FSDP over libddp.

    torch.distributed.init_process_group("ddp")

PyTorch finds it by itself once the package is installed; `import ddp_torch` registers it too.
"""

import glob
import os

import torch
import torch.distributed as dist

from . import _C  # after torch, whose libraries it needs

__all__ = []


def _create(store, rank, size, timeout):
    return _C.create(store, rank, size, timeout)


def _name_nccl():
    """PyTorch's NCCL, which its wheels bring along, also for ddp_probe, in whose process PyTorch is not."""
    folder = os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "nvidia", "nccl", "lib")
    for library in glob.glob(os.path.join(folder, "libnccl.so.2")):
        os.environ.setdefault("DDP_NCCL_LIBRARY", library)


def _register():
    if dist.is_available() and not hasattr(dist.Backend, "DDP"):
        dist.Backend.register_backend("ddp", _create, devices=["cpu", "cuda"])


def _autoload():
    """PyTorch calls it when it is imported."""


_name_nccl()
_register()
