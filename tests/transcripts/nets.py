"""Networks of the transcripts, where they stand as `net.py`. Their weights are multiples
of 1/8 and their images are black and white, so that float32 holds every sum exactly."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F


def eighths(module: nn.Module, step: int, period: int = 7) -> None:
    """Set all weights to multiples of 1/8 around 0, in an order that no flip and no
    exchange of axes leaves as it is.

    Args:
        step: no multiple of `period`, and so that no two filters are alike.
        period: how many different values there are.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            numbers = torch.arange(parameter.numel()) * step % period - period // 2
            parameter.copy_(numbers.reshape(parameter.shape) / 8)


class Small(nn.Module):
    """Images [3, 8, 16] to five classes. `act` runs twice, a third ReLU is a function,
    and `far` is a branch."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.edges = nn.Conv2d(3, 4, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.mix = nn.Conv2d(4, width, 3, stride=2, padding=1, groups=2)
        self.far = nn.Conv2d(width, width, 3, padding=2, dilation=2)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(width, 5)
        for step, module in ((5, self.mix), (3, self.far), (4, self.head)):
            eighths(module, step)
        weight = self.edges.weight.data.zero_()
        bias = self.edges.bias.data.zero_()
        # red as it is
        weight[0, 0, 1, 1] = 1
        # where green begins (from left to right: 1) and ends (-1)
        weight[1, 1, 1, 2] = 1
        weight[1, 1, 1, 0] = -1
        # constant
        bias[2] = 0.5
        # red again, but never above zero
        weight[3, 0, 1, 1] = 1
        bias[3] = -1

    def forward(self, image: Tensor) -> Tensor:
        edges = self.act(self.edges(image))
        mixed = self.act(self.mix(edges))
        joined = F.relu(mixed + self.far(mixed))
        return self.head(self.pool(joined).mean((2, 3)))


class Tokens(nn.Module):
    """A transformer of one block: images [3, 4, 6] to a class token and 2×3 tokens of
    eight numbers, and to three classes. Each head looks for red."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, stride=2)
        self.token = nn.Parameter(torch.ones(1, 1, 8) / 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.widen = nn.Linear(8, 12)
        self.act = nn.GELU()
        self.narrow = nn.Linear(12, 8)
        self.head = nn.Linear(8, 3)
        for step, module in enumerate((self.patch, self.widen, self.narrow, self.head)):
            eighths(module, step + 2, 11)
        eighths(self.attention, 3, 11)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.patch(image).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.token, patches), dim=1)
        attended, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        tokens = tokens + attended
        tokens = tokens + self.narrow(self.act(self.widen(tokens)))
        return self.head(tokens[:, 0])


class Boxes(nn.Module):
    """Answers as torchvision's detectors do: a box around red and one around green, each
    with the largest value of its colour as its score."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 2, 1, bias=False)
        self.backbone.weight.data = torch.eye(2, 3)[:, :, None, None] * 0.75
        self.backbone.weight.data[1] *= 0.5

    def forward(self, image: Tensor) -> list[dict[str, Tensor]]:
        maps = self.backbone(image)[0]
        boxes = []
        for colour in maps:
            rows, columns = (colour > 0).nonzero(as_tuple=True)
            if len(rows):
                ends = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                boxes.append(torch.stack(ends).float())
        scores = maps.amax((1, 2))
        found = scores > 0
        corners = torch.stack(boxes) if boxes else torch.zeros(0, 4)
        labels = torch.tensor([1, 2])[found]
        return [{"boxes": corners, "labels": labels, "scores": scores[found]}]


class Masks(nn.Module):
    """Answers as torchvision's segmentations do: background, red and green."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.classifier = nn.Conv2d(4, 3, 1)
        self.stem.weight.data = torch.eye(4, 3)[:, :, None, None]
        self.stem.bias.data.zero_()
        self.classifier.weight.data.zero_()
        self.classifier.weight.data[1, 0] = 2
        self.classifier.weight.data[2, 1] = 2
        self.classifier.bias.data = torch.tensor([1.0, 0.0, 0.0])

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {"out": self.classifier(self.stem(image))}


class Odd(nn.Module):
    """Modules that return a tuple, a dict, nothing and a text; one that never runs, and
    a list that is no module of its own to run."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.named = Named()
        self.silent = Silent()
        self.spare = nn.ReLU()
        self.steps = nn.ModuleList([nn.Conv2d(3, 2, 1)])
        eighths(self.steps, 3)

    def forward(self, image: Tensor) -> Tensor:
        left, right = self.pair(image)
        named = self.named(left)
        for value in (left, right):
            self.silent(value)
        return self.steps[0](named["twice"])


class Pair(nn.Module):
    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        return image, image[:, :1, :, ::2] - 1


class Named(nn.Module):
    def forward(self, image: Tensor) -> dict[str, Tensor | str]:
        return {"twice": image * 2, "sum": image.sum((2, 3)), "text": "no tensor"}


class Silent(nn.Module):
    def forward(self, image: Tensor) -> None:
        return None


class Holes(nn.Module):
    """NaN where the image is black (0 / 0), and infinity where it is not (1 / 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.divide = Divide()
        self.mend = nn.ReLU()

    def forward(self, image: Tensor) -> Tensor:
        return self.mend(self.divide(image))


class Divide(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        red, green, blue = image.split(1, dim=1)
        return torch.cat((red / 0, -green / (1 - green), blue), dim=1)


class Fussy(nn.Module):
    """Takes images of 8 rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Rows()

    def forward(self, image: Tensor) -> Tensor:
        return self.inner(image)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Conv2d(3, 2, 1)
        eighths(self.scale, 2)

    def forward(self, image: Tensor) -> Tensor:
        if image.shape[2] != 8:
            raise ValueError(f"{image.shape[2]} rows are not 8")
        return self.scale(image)


class Clip(nn.Module):
    """Clips or volumes [1, 1, D, H, W]: half of each slice, and what differs from the
    next one."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Conv3d(1, 2, (2, 1, 1), bias=False)
        self.steps.weight.data.zero_()
        self.steps.weight.data[0, 0, 0] = 0.5
        self.steps.weight.data[1, 0, 0] = -1
        self.steps.weight.data[1, 0, 1] = 1

    def forward(self, clip: Tensor) -> Tensor:
        return self.steps(clip)


class Shift(nn.Module):
    """Takes two images: where the second differs from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.grey = nn.Conv2d(3, 1, 1, bias=False)
        self.grey.weight.data.fill_(0.25)

    def forward(self, before: Tensor, after: Tensor) -> Tensor:
        return self.grey(after) - self.grey(before)


class Audited(nn.Module):
    """Images to activations with known faults. Of the 20 channels of `relu` three are
    dead, two constant and two the double of another one; of the four of `sigmoid` one is
    saturated and one constant; and `pick` is the convolution that takes all 20."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 20, 1)
        self.relu = nn.ReLU()
        self.pick = nn.Conv2d(20, 4, 1)
        self.sigmoid = nn.Sigmoid()
        eighths(self.conv, 5)
        eighths(self.pick, 3)
        weight = self.conv.weight.data[:, :, 0, 0]
        bias = self.conv.bias.data.zero_()
        # dead: 2, 7 and 19
        for channel in (2, 7, 19):
            weight[channel] = 0
            bias[channel] = -0.5
        # constant: 5 and 11
        for channel in (5, 11):
            weight[channel] = 0
            bias[channel] = channel / 8
        # twice another channel: 14 that of 3, and 16 that of 4
        weight[3] = torch.tensor([1.0, 0.5, 0.25])
        weight[4] = torch.tensor([0.25, 0.5, 1.0])
        weight[14] = 2 * weight[3]
        weight[16] = 2 * weight[4]
        # saturated: 1; constant: 2
        self.pick.weight.data[1] = 0
        self.pick.weight.data[1, 3] = 64
        self.pick.bias.data[1] = 32
        self.pick.weight.data[2] = 0

    def forward(self, image: Tensor) -> Tensor:
        return self.sigmoid(self.pick(self.relu(self.conv(image))))


class Bounded(nn.Module):
    """Activations one after the other, of which some have no zeros to be dead at."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
        self.six = nn.ReLU6()
        self.soft = nn.GELU()
        self.leak = nn.LeakyReLU(0.125)
        self.tanh = nn.Hardtanh(-0.5, 0.5)
        self.conv.weight.data = torch.tensor([[8.0, 0, 4], [1, 2, -1]])[
            :, :, None, None
        ]
        self.conv.bias.data = torch.tensor([0.0, -0.5])

    def forward(self, image: Tensor) -> Tensor:
        six = self.six(self.conv(image))
        return self.tanh(self.leak(self.soft(six) - 1))


def grey(width: int = 2) -> nn.Sequential:
    """A network of images of one channel, made of torch's own modules alone."""
    conv = nn.Conv2d(1, width, (1, 3), padding=(0, 1))
    last = nn.Conv2d(width, 2, 1)
    eighths(conv, 2)
    eighths(last, 4)
    return nn.Sequential(conv, nn.ReLU(), last)


class Generator(nn.Module):
    """Numbers z [1, 4] to an image [1, 1, 4, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = nn.Linear(4, 6)
        self.grow = nn.ConvTranspose2d(1, 1, 2, stride=2)
        eighths(self.seed, 2)
        eighths(self.grow, 3)

    def forward(self, z: Tensor) -> Tensor:
        return self.grow(self.seed(z).reshape(1, 1, 2, 3))


class Steered(nn.Module):
    """Takes a factor beside the image, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(3, 2, 1)
        eighths(self.mix, 2)

    def forward(
        self, image: Tensor, factor: float, mask: Tensor | None = None
    ) -> Tensor:
        mixed = self.mix(image) * factor
        return mixed if mask is None else mixed * mask


def twice_as_red(image: Image.Image) -> Tensor:
    """A transform: red alone, doubled, at half the resolution."""
    pixels = torch.tensor(np.asarray(image), dtype=torch.float32) / 255
    pixels[:, :, 0] *= 2
    return pixels.permute(2, 0, 1)[:, ::2, ::2]


class Residual(nn.Module):
    """Adds in place, upsamples, and calls one convolution by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2, 2, stride=2)
        self.body = nn.Conv2d(2, 2, 3, padding=1)
        self.again = self.body
        self.norm = nn.BatchNorm2d(2)
        self.up = nn.Upsample(scale_factor=2)
        for step, module in ((2, self.stem), (5, self.body)):
            eighths(module, step)
        self.norm.running_mean = torch.tensor([0.5, -0.25])
        self.norm.running_var = torch.tensor([1.0, 4.0])
        self.norm.eps = 0.0

    def forward(self, image: Tensor) -> Tensor:
        out = self.stem(image)
        for module in (self.body, self.again):
            identity = out
            out = module(out)
            out += identity
        return self.up(self.norm(out))


class Phase(nn.Module):
    """Complex numbers: red is their real part, green their imaginary part."""

    def __init__(self) -> None:
        super().__init__()
        self.join = Join()

    def forward(self, image: Tensor) -> Tensor:
        return self.join(image).abs()


class Join(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return torch.complex(image[:, :1], image[:, 1:2])


class Points(nn.Module):
    """Answers as estimators of poses do: a map for red, green and blue each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1, bias=False)
        self.heads = nn.Conv2d(4, 3, 1, bias=False)
        self.stem.weight.data = torch.eye(4, 3)[:, :, None, None]
        self.heads.weight.data = torch.eye(3, 4)[:, :, None, None] * 2

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {"heatmaps": self.heads(self.stem(image))}


class Depth(nn.Module):
    """Answers as estimators of depth do: a number for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2, 3, padding=1)
        self.far = nn.Conv2d(2, 1, 1)
        eighths(self.stem, 3)
        eighths(self.far, 2)

    def forward(self, image: Tensor) -> Tensor:
        return self.far(self.stem(image))[:, 0]


class Embedding(nn.Module):
    """Answers as encoders do: a vector that is no class."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 2, stride=2)
        eighths(self.stem, 3, 11)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {"pooler_output": self.stem(image).mean((2, 3))}


class Both(nn.Module):
    """Takes two images of any sizes, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2, 1)
        eighths(self.stem, 2)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return self.stem(left), self.stem(right)
