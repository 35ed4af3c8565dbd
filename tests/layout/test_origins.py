"""The image followed through functions: small models in which everything is known by
hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from followed import followed
from networks import Net
from PIL import Image
from ramps import look, save
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import featviz as fv


class Attention(nn.Module):
    """Queries look at keys; a softmax, and not a fused function, makes the weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.scores = nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.scores(self.q(x) @ self.k(y).transpose(1, 2))
        return self.drop(scores.softmax(-1)) @ y


class Decoder(nn.Module):
    """As many queries as there are places, 4 × 4, and as many channels as well."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.queries = nn.Parameter(torch.randn(1, 16, 16))
        self.encoder = Attention(16)
        self.decoder = Attention(16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        memory = self.patches(x).flatten(2).transpose(1, 2)
        memory = memory + self.encoder(memory, memory)
        found = self.norm(self.queries + self.decoder(self.queries, memory))
        return {"boxes": self.head(found), "memory": memory}


def test_queries_are_rows_even_where_a_map_has_as_many_places() -> None:
    """16 tokens of the image are 4 × 4 maps; 16 queries that have looked at them are
    rows."""
    seen = followed(Decoder(), 16, 16)
    layouts = {at: capture.layout for at, capture in seen.items()}
    assert (
        layouts["encoder.q", ""]
        == layouts["encoder", ""]
        == layouts["", "memory"]
        == "tokens"
    )
    assert layouts["decoder.k", ""] == "tokens"
    for name in ("decoder.q", "decoder", "norm", "head"):
        assert layouts[name, ""] == "sequence", name
    assert layouts["", "boxes"] == "sequence"
    boxes = seen["", "boxes"]
    memory = seen["", "memory"]
    assert torch.equal(boxes.maps[..., 0], boxes.tensor[0].T)
    assert torch.equal(memory.maps, memory.tensor[0].T.reshape(16, 4, 4))


def test_attention_is_what_a_softmax_gives() -> None:
    """Of [1, 16, 16] in an attention only that behind the softmax is one; rectangles,
    too."""
    seen = followed(Decoder(), 16, 16)
    square = {
        name for (name, _), one in seen.items() if one.tensor.shape == (1, 16, 16)
    }
    attention = {name for (name, _), one in seen.items() if one.layout == "attention"}
    assert attention == {"encoder.drop", "decoder.drop"} < square
    seen = followed(Decoder(), 24, 24)
    weights = seen["decoder.drop", ""]
    assert (weights.layout, weights.maps.shape) == ("attention", (1, 16, 36))
    assert torch.equal(weights.maps, weights.tensor)


def windows(x: Tensor) -> Tensor:
    """Rolled, padded from 6 × 10 to 8 × 12, and cut into 2 × 3 windows of 4 × 4; no
    attribute of the model says so."""
    x = F.pad(torch.roll(x, (-1, -2), (2, 3)), (0, 2, 0, 2))
    return x.reshape(4, 2, 4, 3, 4).permute(1, 3, 2, 4, 0).reshape(6, 16, 4)


def patches_first(x: Tensor) -> Tensor:
    """[4, 15, C]: the places in a patch, then the patches."""
    return x.reshape(1, 4, 3, 2, 5, 2).permute(0, 3, 5, 2, 4, 1).reshape(4, 15, 4)


def columns(x: Tensor) -> Tensor:
    """[columns, rows, C], a column after another."""
    return x[0].permute(2, 1, 0)


def channels_in_the_middle(x: Tensor) -> Tensor:
    """[5, C, 12]: stripes of two columns."""
    return x.reshape(4, 6, 5, 2).permute(2, 0, 1, 3).reshape(5, 4, 12)


@pytest.mark.parametrize(
    "cut", [windows, patches_first, columns, channels_in_the_middle]
)
def test_pieces_in_any_order_are_put_back(cut: Callable[[Tensor], Tensor]) -> None:
    """The picture of the pieces is that of the map that they were cut from, to the bit."""
    parts = {"whole": nn.Conv2d(3, 4, 2, 2), "pieces": nn.Identity()}
    model = Net(lambda self, x: self.pieces(cut(self.whole(x)).clone()), **parts)
    seen = followed(model, 12, 20)
    assert seen["pieces", ""].layout == "windows"
    assert torch.equal(seen["pieces", ""].maps, seen["whole", ""].tensor[0])


@pytest.mark.parametrize(
    "pool",
    [lambda x: x.max(dim=1).values, lambda x: torch.min(x, 1)[0], lambda x: x.amax(1)],
)
def test_places_of_a_patch_become_one_by_a_maximum(
    pool: Callable[[Tensor], Tensor],
) -> None:
    """As Hiera pools its queries; the larger of two tensors keeps their places."""

    def way(self: nn.Module, x: Tensor) -> Tensor:
        pieces = self.whole(x).reshape(1, 4, 3, 2, 5, 2).permute(0, 3, 5, 2, 4, 1)
        pieces = torch.max(pieces, -pieces)
        return self.pooled(pool(pieces.reshape(1, 4, 15, 4)).clone())

    seen = followed(Net(way, whole=nn.Conv2d(3, 4, 2, 2), pooled=nn.Identity()), 12, 20)
    pooled = seen["pooled", ""]
    patches = seen["whole", ""].tensor[0].abs().unfold(1, 2, 2)
    assert pooled.layout == "tokens"
    expected = pool(patches.unfold(2, 2, 2).flatten(3).movedim(3, 0)[None])[0]
    assert torch.equal(pooled.maps, expected)


def tokens(change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Tokens of an 8 × 12 map, changed by a function."""

    def way(self: nn.Module, x: Tensor) -> Tensor:
        return self.same(change(self.patches(x).flatten(2).transpose(1, 2)))

    return Net(way, patches=nn.Conv2d(3, 5, 4, 4), same=nn.Identity())


GRIDS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, int]]] = {
    "every second row and column": (
        lambda x: x.unflatten(1, (8, 12))[:, ::2, ::2].flatten(1, 2),
        (4, 6),
    ),
    "einsum": (lambda x: torch.einsum("btd,de->bte", x, torch.eye(5)), (8, 12)),
    "two tokens in front": (lambda x: torch.cat([torch.zeros(1, 2, 5), x], 1), (8, 12)),
    "split and joined": (lambda x: torch.cat(x.chunk(3, 1), 1), (8, 12)),
}


@pytest.mark.parametrize("name", GRIDS)
def test_what_keeps_the_rows_of_the_image_gives_tokens(name: str) -> None:
    """The maps are the tokens, row by row."""
    change, (high, wide) = GRIDS[name]
    one = followed(tokens(change), 32, 48)["same", ""]
    assert one.layout == "tokens"
    assert torch.equal(one.maps, one.tensor[0, -high * wide :].T.reshape(5, high, wide))


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "the largest": lambda x: x.topk(96, 1)[0],
    "twice": lambda x: torch.cat([x, x], 1),
    "a mean": lambda x: x.mean(1, keepdim=True).repeat(1, 96, 1),
    "queries": lambda x: torch.zeros(1, 96, 96).softmax(-1) @ x,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_loses_the_places_is_a_sequence(name: str) -> None:
    """However many tokens there are; none is left out of the rows."""
    one = followed(tokens(CHANGES[name]), 32, 48)["same", ""]
    assert one.layout == "sequence"
    assert torch.equal(one.maps[..., 0], one.tensor[0].T)


def test_patches_that_a_linear_layer_merges_make_a_coarser_map() -> None:
    """Four neighbours side by side become one token, as in Swin, without a convolution."""

    def way(self: nn.Module, x: Tensor) -> Tensor:
        x = self.patches(x)
        x = torch.cat([x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)], 1)
        return self.merge(x.flatten(2).transpose(1, 2))

    model = Net(way, patches=nn.Conv2d(3, 5, 4, 4), merge=nn.Linear(20, 6))
    merged = followed(model, 32, 48)["merge", ""]
    assert merged.layout == "tokens"
    assert torch.equal(merged.maps, merged.tensor[0].T.reshape(6, 4, 6))


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        (("output",), {"ablate": "patches:0"}),
        (("output", "grad"), {"edit": "patches:grad*0.5", "target": "layer:head"}),
    ],
)
def test_interventions_leave_layouts_as_they_are(
    kinds: tuple[str, ...], options: dict[str, str]
) -> None:
    """Tokens behind a layer that was changed are tokens still, and so are their
    gradients."""
    image = torch.rand(3, 16, 16)
    done = fv.run(
        Decoder(), image, "encoder,norm", capture=kinds, preset="none", **options
    )
    found = {(maps.layer, maps.kind, maps.row.layout) for maps in done.captures}
    layouts = {"encoder": "tokens", "norm": "sequence"}
    assert found == {(name, kind, layouts[name]) for name in layouts for kind in kinds}


def test_each_shape_is_followed_once_and_only_where_it_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of two sizes are two passes with a function mode; of a model without
    tokens, one."""
    entered: list[type] = []
    enter = TorchFunctionMode.__enter__

    def counting(self: TorchFunctionMode) -> object:
        entered.append(type(self))
        return enter(self)

    monkeypatch.setattr(TorchFunctionMode, "__enter__", counting)
    images = [
        Image.new("RGB", size, "red")
        for size in ((16, 16), (16, 32), (16, 16), (16, 32))
    ]
    for model, layers, times in (
        (Decoder(), "norm,patches", 2),
        (Decoder(), "patches", 1),
    ):
        entered.clear()
        out = tmp_path / layers
        done = fv.run(model, images, layers, out, preset="none")
        assert not done.failures
        assert len(entered) == times


class Detector(nn.Module):
    """Patches between a class token and three tokens of their own, as YOLOS has them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.last = nn.Identity()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.detection_tokens = nn.Parameter(torch.randn(1, 3, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.last(torch.cat([self.cls_token, x, self.detection_tokens], 1))


@pytest.mark.parametrize("options", [{}, {"tensor_layout": "last=tokens:4x6+1,3"}])
def test_tokens_may_stand_behind_the_grid(
    options: dict[str, str], tmp_path: Path
) -> None:
    """The follower finds them, and the option names them; each of the three is a row."""
    model = Detector()
    _, found = look(model, save(tmp_path, 16, 24), "last", (16, 24), **options)
    before = "class_token" if not options else "extra_token"
    assert {key for _, _, key in found} == {"", before, "token_behind"}
    assert found["last", 0, ""]["grid"]["tile"] == [4, 6]
    for key, own in (
        (before, model.cls_token),
        ("token_behind", model.detection_tokens),
    ):
        ends = float(own.min()), float(own.max())
        assert found["last", 0, key]["range"] == pytest.approx(ends)


class UnfoldedAttention(nn.Module):
    """[1, C, 4, N], the places in a patch by patches, as in Hugging Face's MobileViTV2;
    and windows whose tokens have heads, with the weights of each window."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Conv2d(3, 6, 2, 2)
        self.folded = nn.Identity()
        self.attn_q = nn.Identity()
        self.attn_drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.whole(x)
        cut = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 1, 3, 5, 2, 4)
        x = self.folded(cut.reshape(1, 6, 4, -1))
        windows = (
            cut.flatten(4).permute(4, 0, 2, 3, 1).reshape(-1, 4, 2, 3).transpose(1, 2)
        )
        q = self.attn_q(windows)  # [windows, 2 heads, 4 tokens, 3]
        return self.attn_drop((q @ q.transpose(-2, -1)).softmax(-1)) @ q + x.sum() * 0


def test_unfolded_maps_and_heads_of_windows_are_put_back() -> None:
    """Their pictures are that of the whole map, to the bit; weights are a matrix for
    each head of each window."""
    seen = followed(UnfoldedAttention(), 12, 20)
    unfolded = seen["whole", ""].tensor[0]
    for name in ("folded", "attn_q"):
        assert seen[name, ""].layout == "windows"
        assert torch.equal(seen[name, ""].maps, unfolded), name
    weights = seen["attn_drop", ""]
    assert (weights.layout, weights.maps.shape) == ("attention", (30, 4, 4))
    assert torch.equal(weights.maps.flatten(), weights.tensor.flatten())


def test_tokens_of_several_maps_are_rows() -> None:
    """16 × 16 and 8 × 8 places in one row, as in the pixel decoder of Mask2Former, are
    no grid, whatever their number."""

    def pyramid(self: nn.Module, x: Tensor) -> Tensor:
        maps = [fine := self.fine(x), self.coarse(fine)]
        return self.last(torch.cat([one.flatten(2) for one in maps], 2).transpose(1, 2))

    fine = nn.Conv2d(3, 8, 4, 4)
    coarse = nn.Conv2d(8, 8, 2, 2)
    model = Net(pyramid, fine=fine, coarse=coarse, last=nn.ReLU())
    assert followed(model, 64, 64)["last", ""].layout == "sequence"
