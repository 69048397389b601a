#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The first 20 losses of an example model equal PyTorch's, from equal weights and inputs; and each reads the other's weights.

  torch_parity_test.py MODEL TRAINER [FLAG...]     MODEL: mlp, lenet, resnet20, resnet50; TRAINER: train_mlp or train_cnn

The batch is the whole data set, so that the order of samples does not matter. Exits with 77 where there is no PyTorch.
"""
import array
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile

try:
    import warnings

    warnings.filterwarnings("ignore")
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
except ImportError:
    print("skipped: no PyTorch for", sys.executable)
    sys.exit(77)

STEPS = 20
# Batch normalisation makes what is rounded differently grow from step to step, the faster the larger steps are: at 0.01
# PyTorch's own losses of resnet20 differ by more than the tolerance between its memory formats or numbers of threads.
# The norm of resnet50's first gradient is above 1000: even at 3e-6 our losses with AVX2 and AVX-512 differ by 3 %.
LR = {"mlp": 0.01, "lenet": 0.01, "resnet20": 0.003, "resnet50": 1e-7}
TOLERANCE = 1e-3


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.more = stride, outputs - inputs

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride != 1 or self.more:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(x + y)


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))  # fmt: skip


def resnet20():
    layers = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    inputs = 16
    for outputs in (16, 32, 64):
        for block in range(3):
            layers.append(BasicBlock(inputs, outputs, 2 if outputs > 16 and block == 0 else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs))  # fmt: skip
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return F.relu(self.body(x) + (x if self.shortcut is None else self.shortcut(x)))


def resnet50():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if width > 64 and block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 10))


def save_safetensors(path, state):
    header, data = {}, b""
    for name, tensor in state.items():
        kind, code = ("I64", "q") if tensor.dtype == torch.int64 else ("F32", "f")
        bytes_of = array.array(code, tensor.detach().reshape(-1).tolist()).tobytes()
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(bytes_of)]}
        data += bytes_of
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def load_safetensors(path):
    with open(path, "rb") as file:
        content = file.read()
    (length,) = struct.unpack("<Q", content[:8])
    state = {}
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        values = array.array({"F32": "f", "I64": "q"}[entry["dtype"]], content[begin:end]).tolist()
        dtype = {"F32": torch.float32, "I64": torch.int64}[entry["dtype"]]
        state[name] = torch.tensor(values, dtype=dtype).reshape(entry["shape"])
    return state


def write_data(folder, shape):
    """Writes a data set of random images, and returns the training images, normalised, with their labels."""
    generator = random.Random(1)
    features = math.prod(shape)

    def images(count):
        return [(generator.randbytes(features), generator.randrange(10)) for _ in range(count)]

    if shape[0] == 3:
        parts = [images(13) for _ in range(6)]
        for name, part in zip([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"], parts):
            with open(f"{folder}/{name}.bin", "wb") as file:
                file.write(b"".join(bytes([label]) + pixels for pixels, label in part))
        train = sum(parts[:5], [])
    else:
        train = images(64)
        for name, part in (("train", train), ("t10k", images(16))):
            with open(f"{folder}/{name}-images-idx3-ubyte", "wb") as file:
                file.write(struct.pack(">IIII", 0x803, len(part), *shape[1:]) + b"".join(pixels for pixels, _ in part))
            with open(f"{folder}/{name}-labels-idx1-ubyte", "wb") as file:
                file.write(struct.pack(">II", 0x801, len(part)) + bytes(label for _, label in part))
    x = torch.tensor([list(pixels) for pixels, _ in train], dtype=torch.float64).reshape(len(train), *shape)
    mean, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True, correction=0)
    return ((x - mean) / deviation).float(), torch.tensor([label for _, label in train])


def main():
    name, command = sys.argv[1], sys.argv[2:]
    shape = (3, 32, 32) if name.startswith("resnet") else (1, 28, 28)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = {"mlp": mlp, "lenet": lenet, "resnet20": resnet20, "resnet50": resnet50}[name]()
    with tempfile.TemporaryDirectory() as folder:
        x, y = write_data(folder, shape)
        save_safetensors(f"{folder}/initial", model.state_dict())
        subprocess.run(
            command + ([] if name == "mlp" else [f"--model={name}"])
            + [f"--data={folder}", f"--batch={len(y)}", f"--steps={STEPS}", f"--lr={LR[name]}", "--momentum=0.9",
               f"--init-weights={folder}/initial", f"--export-weights={folder}/trained", f"--summary-json={folder}/summary"],
            check=True, stdout=subprocess.DEVNULL, env={**os.environ, "DDP_LOG_LEVEL": "error"})  # fmt: skip
        with open(f"{folder}/summary") as file:
            ours = json.load(file)["first_step_losses"]
        trained = load_safetensors(f"{folder}/trained")

    optimizer = torch.optim.SGD(model.parameters(), lr=LR[name], momentum=0.9)
    theirs = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    assert len(ours) == STEPS, ours
    worst = max(abs(a - b) / b for a, b in zip(ours, theirs))
    print(f"{name}: losses {theirs[0]:.6f} to {theirs[-1]:.6f}, ours differ by at most {worst:.2e} of them")
    assert theirs[-1] < 0.9 * theirs[0], theirs
    assert worst < TOLERANCE, (ours, theirs)

    # Their model takes our weights, and answers in evaluation as it does with its own.
    model.eval()
    expected = model(x)
    assert all(int(count) == STEPS for key, count in trained.items() if key.endswith("num_batches_tracked"))
    model.load_state_dict(trained, strict=True)
    difference = (model(x) - expected).abs().max().item() / expected.abs().max().item()
    print(f"{name}: outputs with weights trained here differ by {difference:.2e} of the largest")
    assert difference < 0.02, difference


if __name__ == "__main__":
    main()
