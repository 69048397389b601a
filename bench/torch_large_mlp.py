#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The peer torch_ddp.py with one more model: mlp25m, an MLP 784-3136-3136-3136-1024-10 of 25.4 million parameters.

  torchrun --nproc_per_node=2 torch_large_mlp.py FOLDER_OF_TORCH_DDP --model mlp25m --device cuda [FLAG OF torch_ddp.py ...]
"""
import sys

sys.path.insert(0, sys.argv.pop(1))
import torch.nn as nn  # noqa: E402
import torch_ddp  # noqa: E402

WIDTHS = (784, 3136, 3136, 3136, 1024)


def mlp25m():
    layers = [nn.Flatten()]
    for inputs, outputs in zip(WIDTHS, WIDTHS[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTHS[-1], 10))


torch_ddp.MODELS["mlp25m"] = (mlp25m, (1, 28, 28), 10)
torch_ddp.main()
