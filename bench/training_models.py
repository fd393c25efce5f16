"""Models and batches of ``training.py``: a small GPT, a ResNet-like network and a deep MLP.

Every rank builds the same weights from one seed and draws its batch of a step from (rank, step), so
a training can be repeated bit by bit. The numbers of elements of all parameters are multiples of
128: four equal parts of any bucket are whole cache lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, CLASSES = 256, 16
MLP_LAYERS, MLP_WIDTH = 64, 256


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a model; ``image`` is the side in pixels, ``context`` the length in tokens.

    The MLP has one size: its step is bound by the host.
    """

    gpt_layers: int
    gpt_width: int
    context: int
    resnet_blocks: int
    resnet_width: int
    image: int
    batch: int


SIZES = {
    "small": Size(
        gpt_layers=1, gpt_width=128, context=32, resnet_blocks=1, resnet_width=128, image=8, batch=2
    ),
    "base": Size(
        gpt_layers=2, gpt_width=256, context=64, resnet_blocks=4, resnet_width=128, image=8, batch=4
    ),
    "large": Size(
        gpt_layers=12,
        gpt_width=1024,
        context=512,
        resnet_blocks=16,
        resnet_width=512,
        image=28,
        batch=16,
    ),
}


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input (GPT-2's order, without dropout).

    Attention is written out, so its gradient has one order of additions on every device.
    """

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.register_buffer(
            "future", torch.ones(context, context, dtype=torch.bool).triu(1), persistent=False
        )

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.attend(self.before_attention(x)).view(shape).permute(2, 0, 3, 1, 4)
        weights = (
            (query @ key.transpose(-1, -2) / (width // self.heads) ** 0.5)
            .masked_fill(self.future, float("-inf"))
            .softmax(-1)
        )
        x = x + self.project((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.before_feed(x))


class Gpt(nn.Module):
    """Tokens (batch, context) -> logits (batch, context, VOCABULARY)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token, self.position = (
            nn.Embedding(VOCABULARY, size.gpt_width),
            nn.Embedding(size.context, size.gpt_width),
        )
        self.blocks = nn.ModuleList(
            Block(size.gpt_width, size.context) for _ in range(size.gpt_layers)
        )
        self.last, self.logits = (
            nn.LayerNorm(size.gpt_width),
            nn.Linear(size.gpt_width, VOCABULARY, bias=False),
        )

    def forward(self, tokens: Any) -> Any:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.last(x))


class Residual(nn.Module):
    """Two convolutions with batch normalisation, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        return functional.relu(x + self.path(x))


class ResNet(nn.Module):
    """Images (batch, 3, side, side) -> logits (batch, CLASSES)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.resnet_width
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.ModuleList(Residual(width) for _ in range(size.resnet_blocks))
        self.logits = nn.Linear(width, CLASSES, bias=False)

    def forward(self, images: Any) -> Any:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.logits(x.mean((2, 3)))


class Mlp(nn.Module):
    """Vectors (batch, MLP_WIDTH) -> logits (batch, CLASSES).

    Kernels of its small layers take less time than their launches, so a step is bound by the host:
    it shows what a backend's calls cost.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(MLP_WIDTH, MLP_WIDTH, bias=False) for _ in range(MLP_LAYERS)
        )
        self.logits = nn.Linear(MLP_WIDTH, CLASSES, bias=False)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + functional.relu(block(x))
        return self.logits(x)


MODELS = {"gpt": Gpt, "resnet": ResNet, "mlp": Mlp}


def make_model(name: str, size: Size) -> Any:
    """Return the model with the initial weights of every rank."""
    torch.manual_seed(0)
    return MODELS[name](size)


def make_batch(name: str, size: Size, rank: int, step: int) -> tuple[Any, Any]:
    """Return inputs and targets of a rank's step.

    Counting modulo VOCABULARY for the GPT, tinted noise for the ResNet, noise for the MLP.
    """
    source = torch.Generator().manual_seed(1_000_003 * (rank + 1) + step)
    if name == "gpt":
        start, stride = (
            torch.randint(VOCABULARY, (size.batch, 1), generator=source),
            torch.randint(1, 4, (size.batch, 1), generator=source),
        )
        tokens = (start + stride * torch.arange(size.context + 1)) % VOCABULARY
        return tokens[:, :-1], tokens[:, 1:].contiguous()
    labels = torch.randint(CLASSES, (size.batch,), generator=source)
    if name == "mlp":
        return torch.randn(size.batch, MLP_WIDTH, generator=source), labels
    tints = torch.randn(CLASSES, 3, 1, 1, generator=torch.Generator().manual_seed(1))
    return (
        tints[labels] + torch.randn(size.batch, 3, size.image, size.image, generator=source),
        labels,
    )


def loss_of(logits: Any, targets: Any) -> Any:
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
