"""The image followed through functions: small models in which everything is known by
hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from followed import Seen, drawn_as, followed
from networks import Net
from numpy.testing import assert_array_equal
from PIL import Image
from ramps import look, save
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import featviz as fv
from featviz.layout.tracing.positions import SourceMaps

Change = Callable[[Tensor], Tensor]


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
        return self.drop(scores.softmax(2)) @ y  # the last of three axes


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
        queries = self.norm(self.queries + self.decoder(self.queries, memory))
        return {"boxes": self.head(queries), "memory": memory}


@pytest.fixture(scope="module")
def decoded() -> dict[tuple[str, str], Seen]:
    """What is drawn of it where there are as many tokens as queries."""
    return followed(Decoder(), 16, 16)


@pytest.mark.parametrize(
    ("layer", "key", "layout"),
    [
        ("encoder.q", "", "tokens"),
        ("encoder", "", "tokens"),
        ("decoder.k", "", "tokens"),
        ("", "memory", "tokens"),
        ("decoder.q", "", "sequence"),
        ("decoder", "", "sequence"),
        ("norm", "", "sequence"),
        ("head", "", "sequence"),
        ("", "boxes", "sequence"),
    ],
)
def test_queries_are_rows_even_where_a_map_has_as_many_positions(
    layer: str,
    key: str,
    layout: str,
    decoded: dict[tuple[str, str], Seen],
) -> None:
    """16 tokens of the image are 4 × 4 maps; 16 queries that have looked at them are
    rows."""
    seen = decoded[layer, key]
    assert seen.layout == layout
    rows = seen.tensor[0].T
    expected = rows.unflatten(1, (4, 4)) if layout == "tokens" else rows[..., None]
    assert_array_equal(seen.maps, expected)


def test_attention_is_what_a_softmax_gives(
    decoded: dict[tuple[str, str], Seen],
) -> None:
    """Of [1, 16, 16] in an attention only that behind the softmax is one."""
    weights = {
        name for (name, _), seen in decoded.items() if seen.layout == "attention"
    }
    assert weights == {"encoder.drop", "decoder.drop"}
    assert decoded["decoder.scores", ""].tensor.shape == (1, 16, 16)


@pytest.mark.medium
def test_attention_may_be_a_rectangle() -> None:
    """16 queries that look at 36 tokens give 16 rows of 36 weights."""
    weights = drawn_as(Decoder(), 24, 24, "decoder.drop")
    assert weights.layout == "attention"
    assert weights.maps.shape == (1, 16, 36)
    assert_array_equal(weights.maps, weights.tensor)


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


def of_convolution(change: Change) -> nn.Module:
    """A map of 6 × 10 of four channels, `before`, which is changed, `after`."""
    return Net(
        lambda self, x: self.after(change(self.before(x)).clone()),
        before=nn.Conv2d(3, 4, 2, 2),
        after=nn.Identity(),
    )


@pytest.mark.parametrize(
    "cut",
    [windows, patches_first, columns, channels_in_the_middle],
)
def test_pieces_in_any_order_are_put_back(cut: Change) -> None:
    """The picture of the pieces is that of the map that they were cut from, to the bit."""
    seen = followed(of_convolution(cut), 12, 20)
    pieces = seen["after", ""]
    assert pieces.layout == "windows"
    assert_array_equal(pieces.maps, seen["before", ""].tensor[0])


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: x.max(dim=1).values,
        lambda x: torch.min(x, 1)[0],
        lambda x: x.amax(1),
    ],
)
def test_a_patch_becomes_one_position_by_a_maximum(pool: Change) -> None:
    """As Hiera pools its queries; the larger of two tensors keeps their positions."""

    def pooled(x: Tensor) -> Tensor:
        pieces = patches_first(x)
        return pool(torch.max(pieces, -pieces)[None])

    seen = followed(of_convolution(pooled), 12, 20)
    assert seen["after", ""].layout == "tokens"
    # [C, 3, 5, 2, 2]
    patches = seen["before", ""].tensor[0].abs().unfold(1, 2, 2).unfold(2, 2, 2)
    expected = pool(patches.flatten(3).movedim(3, 0)[None])[0]
    assert_array_equal(seen["after", ""].maps, expected)


def tokens_of(x: Tensor) -> Tensor:
    """Tokens [1, T, C] of a map."""
    return x.flatten(2).transpose(1, 2)


def of_tokens(change: Change) -> nn.Module:
    """Tokens of an 8 × 12 map, changed by a function."""
    return Net(
        lambda self, x: self.same(change(tokens_of(self.patches(x)))),
        patches=nn.Conv2d(3, 5, 4, 4),
        same=nn.Identity(),
    )


def every_second(x: Tensor) -> Tensor:
    return x.unflatten(1, (8, 12))[:, ::2, ::2].flatten(1, 2)


def corner(rows: slice, columns: slice) -> Change:
    """A part of the map, of as many tokens as a coarser map of the whole has."""
    return lambda x: x.unflatten(1, (8, 12))[:, rows, columns].flatten(1, 2)


@pytest.mark.parametrize(
    ("change", "height", "width"),
    [
        pytest.param(every_second, 4, 6, id="every second row and column"),
        pytest.param(
            lambda x: torch.einsum("btd,de->bte", x, torch.eye(5)),
            8,
            12,
            id="einsum",
        ),
        pytest.param(
            lambda x: torch.cat([torch.zeros(1, 2, 5), x], 1),
            8,
            12,
            id="two tokens in front",
        ),
        pytest.param(
            lambda x: torch.cat(x.chunk(3, 1), 1),
            8,
            12,
            id="split and joined",
        ),
    ],
)
def test_what_keeps_the_rows_of_the_image_gives_tokens(
    change: Change,
    height: int,
    width: int,
) -> None:
    """The maps are the tokens, row by row."""
    seen = drawn_as(of_tokens(change), 32, 48, "same")
    assert seen.layout == "tokens"
    grid = seen.tensor[0, -height * width :].T.unflatten(1, (height, width))
    assert_array_equal(seen.maps, grid)


@pytest.mark.medium
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x.topk(96, 1)[0], id="the largest"),
        pytest.param(lambda x: torch.cat([x, x], 1), id="twice"),
        pytest.param(corner(slice(4), slice(6)), id="the upper left"),
        pytest.param(corner(slice(4, 8), slice(6, 12)), id="the lower right"),
        pytest.param(lambda x: x.mean(1, keepdim=True).repeat(1, 96, 1), id="a mean"),
        pytest.param(lambda x: torch.zeros(1, 96, 96).softmax(-1) @ x, id="queries"),
    ],
)
def test_what_loses_the_positions_is_a_sequence(change: Change) -> None:
    """Tokens that lost their positions are rows, however many there are."""
    seen = drawn_as(of_tokens(change), 32, 48, "same")
    assert seen.layout == "sequence"
    assert_array_equal(seen.maps[..., 0], seen.tensor[0].T)


@pytest.mark.medium
def test_patches_that_a_linear_layer_merges_make_a_coarser_map() -> None:
    """Four neighbours side by side become one token, as in Swin, without a convolution."""

    def merge(self: nn.Module, x: Tensor) -> Tensor:
        x = self.patches(x)
        corners = [x[:, :, i::2, j::2] for i, j in ((0, 0), (0, 1), (1, 0), (1, 1))]
        return self.merge(tokens_of(torch.cat(corners, 1)))

    model = Net(merge, patches=nn.Conv2d(3, 5, 4, 4), merge=nn.Linear(20, 6))
    merged = drawn_as(model, 32, 48, "merge")
    assert merged.layout == "tokens"
    assert_array_equal(merged.maps, merged.tensor[0].T.reshape(6, 4, 6))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("capture", "options"),
    [
        (["output"], {"ablate": "patches:0"}),
        (["output", "grad"], {"edit": "patches:grad*0.5", "target": "layer:head"}),
    ],
)
def test_interventions_leave_layouts_as_they_are(
    capture: list[str],
    options: dict[str, str],
) -> None:
    """Tokens behind a layer that was changed are tokens still, and so are their
    gradients."""
    done = fv.run(
        Decoder(),
        torch.rand(3, 16, 16),
        "encoder,norm",
        capture=capture,
        preset="none",
        **options,
    )
    assert len(done.captures) == 2 * len(capture)
    layouts = {(maps.layer, maps.row.layout) for maps in done.captures}
    assert layouts == {("encoder", "tokens"), ("norm", "sequence")}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("layers", "passes"),
    [
        ("norm,patches", 2),
        ("patches", 1),
    ],
)
def test_each_shape_is_followed_once_and_only_where_it_matters(
    layers: str,
    passes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Images of two sizes are two passes with a function mode; of layers without
    tokens, one."""
    entered: list[TorchFunctionMode] = []
    enter = TorchFunctionMode.__enter__

    def counting(self: TorchFunctionMode) -> object:
        entered.append(self)
        return enter(self)

    monkeypatch.setattr(TorchFunctionMode, "__enter__", counting)
    square = Image.new("RGB", (16, 16), "red")
    tall = Image.new("RGB", (16, 32), "red")
    done = fv.run(Decoder(), [square, tall, square, tall], layers, preset="none")
    assert not done.failures
    assert len(entered) == passes


class Detector(nn.Module):
    """Patches between a class token and three tokens of their own, as YOLOS has them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.last = nn.Identity()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.detection_tokens = nn.Parameter(torch.randn(1, 3, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = tokens_of(self.patches(x))
        return self.last(torch.cat([self.cls_token, x, self.detection_tokens], 1))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("options", "before"),
    [
        ({}, "class_token"),
        ({"tensor_layout": "last=tokens:4x6+1,3"}, "extra_token"),
    ],
    ids=["followed", "by option"],
)
def test_tokens_may_stand_behind_the_grid(
    options: dict[str, str],
    before: str,
    tmp_path: Path,
) -> None:
    """The follower finds them, and the option names them; each of the three is a row."""
    model = Detector()
    seen = look(model, save(tmp_path, 16, 24), "last", (16, 24), **options)
    assert seen.row("last")["grid"]["tile"] == [4, 6]
    assert {key for _, _, key in seen.captures} == {"", before, "token_behind"}
    tokens = {before: model.cls_token, "token_behind": model.detection_tokens}
    for key, parameter in tokens.items():
        extremes = torch.stack(parameter.detach().aminmax()).tolist()
        assert seen.row("last", key)["range"] == pytest.approx(extremes)


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
        windows = cut.flatten(4).permute(4, 0, 2, 3, 1).reshape(-1, 4, 2, 3)
        q = self.attn_q(windows.transpose(1, 2))  # [windows, 2 heads, 4 tokens, 3]
        return self.attn_drop((q @ q.transpose(-2, -1)).softmax(-1)) @ q + x.sum() * 0


@pytest.mark.medium
@pytest.mark.parametrize("layer", ["folded", "attn_q"])
def test_unfolded_maps_and_heads_of_windows_are_put_back(layer: str) -> None:
    """Their pictures are that of the whole map, to the bit."""
    seen = followed(UnfoldedAttention(), 12, 20)
    assert seen[layer, ""].layout == "windows"
    assert_array_equal(seen[layer, ""].maps, seen["whole", ""].tensor[0])


def test_windows_have_a_matrix_of_weights_for_each_head() -> None:
    """15 windows of two heads have 30 matrices."""
    weights = drawn_as(UnfoldedAttention(), 12, 20, "attn_drop")
    assert weights.layout == "attention"
    assert weights.maps.shape == (30, 4, 4)
    assert_array_equal(weights.maps.flatten(), weights.tensor.flatten())


def test_tokens_of_several_maps_are_rows() -> None:
    """16 × 16 and 8 × 8 places in one row, as in the pixel decoder of Mask2Former, are
    no grid, whatever their number."""

    def pyramid(self: nn.Module, x: Tensor) -> Tensor:
        fine = self.fine(x)
        coarse = self.coarse(fine)
        return self.last(torch.cat([tokens_of(fine), tokens_of(coarse)], 1))

    model = Net(
        pyramid,
        fine=nn.Conv2d(3, 8, 4, 4),
        coarse=nn.Conv2d(8, 8, 2, 2),
        last=nn.ReLU(),
    )
    assert drawn_as(model, 64, 64, "last").layout == "sequence"


def test_patches_at_a_padded_edge_are_as_whole_ones() -> None:
    """Of 3 × 3 positions, in patches of 2 × 2: what lies beyond the edge has no place,
    and does not move that of the patch."""
    maps = SourceMaps()
    maps.begin((3, 3))
    patches = [[1, 2, 4, 5], [3, 0, 6, 0], [7, 8, 0, 0], [9, 0, 0, 0]]
    merged = maps.merge(torch.tensor(patches, dtype=torch.float64))
    assert merged.flatten().tolist() == [10, 11, 12, 13]
