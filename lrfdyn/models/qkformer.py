"""QKFormer (Zhou et al., 2024), ImageNet, CIFAR, Tiny-ImageNet and event-camera form. Stages of Q-K token attention,
then one of any attention."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from lrfdyn.attention import AttentionHost, lif_host
from lrfdyn.errors import require, unknown_name
from lrfdyn.models.base import SpikingModel, classifier
from lrfdyn.models.registry import register_model
from lrfdyn.models.spikformer import Block
from lrfdyn.models.transformer import CIFAR10_DVS, GESTURE, TransformerConfig, stem_widths
from lrfdyn.nn.layers import ConvBN, SpikingConv, add_output, drop_path_rates, init_weights
from lrfdyn.nn.neurons import LIF
from lrfdyn.nn.sections import Section, lean_max_pool, sections_of

Conv = tuple[int, bool]  # the channels of a 3x3 convolution, and whether it pools


class Form(NamedTuple):
    """A layout of the network."""

    stem: tuple[Conv, ...]  # the first convolutions, in units of the channels of the first of all, and
    embeddings: tuple[tuple[Conv, ...], ...]  # those of each stage's embedding
    token_blocks: tuple[int, ...]  # the number of token attention blocks in all stages but the last
    official_keys: tuple[tuple[str, str], ...] = ()  # besides those of all forms


FORMS = {
    "imagenet": Form(((1, True),), (((2, True), (2, False)), ((4, True), (4, False)), ((8, True), (8, False))), (1, 2)),
    "cifar": Form(((1, False),), (((2, False),), ((4, False), (4, True)), ((8, False), (8, True))), (1, 1)),
    # Ours: CIFAR's form and grids for images that are twice as high and wide.
    "tiny_imagenet": Form(((1, True),), (((2, False),), ((4, False), (4, True)), ((8, False), (8, True))), (1, 1)),
    "dvs": Form(
        stem=((1, False), (2, True)),
        embeddings=(((4, True), (8, True)), ((16, False), (16, True))),
        token_blocks=(1,),
        official_keys=(
            (r"^patch_embed1\.proj_(conv|bn)\.", r"stem.0.\1."),
            (r"^patch_embed1\.proj1_", "stem.1."),
            (r"^patch_embed1\.proj2_", "stages.0.embedding.convs.0."),
            (r"^patch_embed1\.proj3_", "stages.0.embedding.convs.1."),
            (r"^patch_embed2\.proj_(conv|bn)\.", r"stages.1.embedding.convs.0.\1."),
        ),
    ),
}


class PooledConv(SpikingConv):
    """SN{pool(BN(Conv3x3(x)))}: the max pool comes before the neuron."""

    def __init__(self, c_in: int, c_out: int, pool: bool) -> None:
        super().__init__(c_in, c_out, LIF(), kernel=3)
        self.pool = pool

    def forward(self, x: Tensor, residual: Tensor | None = None, pool: bool = False) -> Tensor:
        return self.fire(self.neuron, x, residual, pool, pool_first=self.pool)

    def section(self, name: str, pool: bool = False) -> Section:
        def currents(x: Tensor) -> Tensor:
            y = ConvBN.forward(self, x)
            return lean_max_pool(y) if self.pool else y

        section = ConvBN.section(self, name, self.pool)
        return replace(section, run=self, holds="bits", halves=(currents, self.neuron))


def pooled_convs(c_in: int, convs: Sequence[Conv]) -> list[PooledConv]:
    """Convolutions that follow each other."""
    pairs = pairwise([c_in, *(width for width, _ in convs)])
    return [PooledConv(*pair, pool) for pair, (_, pool) in zip(pairs, convs, strict=True)]


class Embedding(nn.Module):
    """Spiking convolutions to a stage's width and grid, with a spiking 1x1 convolution as their shortcut."""

    def __init__(self, c_in: int, convs: Sequence[Conv]) -> None:
        super().__init__()
        self.convs = nn.Sequential(*pooled_convs(c_in, convs))
        self.shortcut = SpikingConv(c_in, convs[-1][0], LIF(), stride=2 ** sum(pool for _, pool in convs))

    def forward(self, x: Tensor) -> Tensor:
        return add_output(self.convs(x), self.shortcut, x)

    def section(self, name: str) -> Section:
        """The embedding as one section."""
        halo, stride = 0, 1
        convs: Any = self.convs
        for conv in (layer.section(name) for layer in convs):
            halo, stride = halo + stride * conv.halo, stride * conv.stride
        return Section(name, self, (self,), self.shortcut.conv.out_channels, "integers", halo, stride)


class TokenAttention(nn.Module):
    """Q-K token attention on `[T, B, dim, H, W]`: SN{sum of q over a head's channels} gates k per head and token."""

    mixes_tokens = False

    def __init__(self, dim: int, heads: int, host: AttentionHost) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k = host.project(dim, dim), host.project(dim, dim)
        self.fire = host.fire()
        self.proj = host.project_out(dim, dim)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        projected, shortcut = SpikingConv.together([self.q, self.k], x)
        q, k = (y.unflatten(2, (self.heads, -1)) for y in projected)
        gate = self.fire(q.sum(3, keepdim=True))
        return self.proj((gate * k).flatten(2, 3), residual=shortcut if residual is x else residual)


class BatchAsTimeLIF(LIF):
    """A LIF neuron that takes the T * B images for its time steps."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])


@dataclass
class QKFormerConfig(TransformerConfig):
    """The options of QKFormer; `attention` is that of the last stage."""

    dim: int = 512
    """Channels of the last stage; those before it have a half of them, and of three stages the first a quarter."""
    depth: int = 10
    """Number of blocks in all stages together."""
    form: str = "imagenet"
    """Layout of the network, "imagenet", "cifar", "tiny_imagenet" (CIFAR's with a pooling stem) or, with two stages,
    "dvs"."""
    legacy_neuron_axis: bool = False
    """In the official code the neuron behind the self-attention's projection runs over the T * B images instead of T
    steps, so that the output for an image depends on the batch around it. True does the same; official weights were
    trained that way."""


@register_model("qkformer_10_384", dim=384, depth=10, heads=6)
@register_model("qkformer_10_512", dim=512, depth=10, heads=8)
@register_model("qkformer_10_768", dim=768, depth=10, heads=12)
@register_model("qkformer_4_384", dim=384, depth=4, heads=8, form="cifar", image_size=32, num_classes=100)
@register_model("qkformer_dvs_2_256", dim=256, depth=2, heads=16, mlp_ratio=1, form="dvs", **CIFAR10_DVS)
@register_model("qkformer_gesture_2_256", dim=256, depth=2, heads=16, form="dvs", **GESTURE)
class QKFormer(SpikingModel):
    """QKFormer: images `[B, C, H, W]` or `[T, B, C, H, W]` to logits `[B, classes]`. Options: `QKFormerConfig`."""

    config_class = QKFormerConfig
    official_keys = (
        (r"^patch_embed1\.proj_(conv|bn)\.", r"stem.\1."),
        *((rf"^patch_embed{i + 1}\.", f"stages.{i}.embedding.") for i in range(3)),
        *((rf"^stage{i + 1}\.", f"stages.{i}.blocks.") for i in range(3)),
        (r"proj[13]_(conv|bn)\.", r"convs.0.\1."),
        (r"proj[24]_(conv|bn)\.", r"convs.1.\1."),
        (r"proj_res_", "shortcut."),
        (r"\.(?:tssa|attn|ssa)\.(q|k|v|proj)_", r".attn.\1."),
        (r"\.mlp\.(?:fc|mlp)([12])_", r".mlp.fc\1."),
    )

    def __init__(self, **options: Any) -> None:
        config = QKFormerConfig(**options)
        super().__init__(config)
        heads = config.heads
        if config.form not in FORMS:
            raise unknown_name("form", config.form, FORMS)
        layout = FORMS[config.form]
        self.official_keys = (*layout.official_keys, *self.official_keys)
        unit = stem_widths(config.dim, parts=layout.embeddings[-1][-1][0])[0]
        parts = [[(unit * width, pool) for width, pool in convs] for convs in (layout.stem, *layout.embeddings)]
        widths = [convs[-1][0] for convs in parts[1:]]
        require(widths[0] % heads == 0, f"heads: expected a divisor of stage 1's width {widths[0]}, got {heads}")
        few = sum(layout.token_blocks)
        depths = [*layout.token_blocks, config.depth - few]
        require(depths[-1] >= 1, f"depth: expected an integer >= {few + 1} in this form, got {config.depth}")
        pools = accumulate(sum(pool for _, pool in convs) for convs in parts)
        self.describe_stages(widths, [2**n for n in pools][1:], config.image_size)
        host = lif_host()
        last_host = replace(host, project_out=_legacy_project_out) if config.legacy_neuron_axis else host
        rates = iter(drop_path_rates(config.drop_path, config.depth))

        def block(stage: int, width: int) -> Block:
            token = stage < len(layout.token_blocks)
            attn = TokenAttention(width, heads, host) if token else config.make_attention(width, self.grid, last_host)
            return Block(attn, width, config.hidden_width(width), next(rates))

        stem = pooled_convs(config.in_channels, parts[0])
        self.stem = nn.Sequential(*stem) if len(stem) > 1 else stem[0]
        self.stages = nn.ModuleList()
        for i, (before, convs) in enumerate(pairwise(parts)):
            embedding = Embedding(before[-1][0], convs)
            blocks = nn.Sequential(*(block(i, widths[i]) for _ in range(depths[i])))
            self.stages.append(nn.Sequential(OrderedDict(embedding=embedding, blocks=blocks)))
        self.head = classifier(config.dim, config.num_classes)
        init_weights(self)
        if not config.legacy_neuron_axis:
            self.official_warning = (
                "official QKFormer weights were trained with a neuron that runs over the batch; this model does not "
                "have it: build the model with legacy_neuron_axis=True to compute what the official code does"
            )

    def head_map(self, x: Tensor) -> Tensor:
        return x

    def sections(self) -> Iterator[Section]:
        if isinstance(self.stem, PooledConv):
            yield self.stem.section("stem")
        else:
            for i, conv in enumerate(self.stem):
                yield conv.section(f"stem.{i}")
        for i, stage in enumerate(self.stages):
            yield stage.embedding.section(f"stages.{i}.embedding")
            yield from sections_of(f"stages.{i}.blocks", stage.blocks)


def _legacy_project_out(c_in: int, c_out: int) -> nn.Module:
    return SpikingConv(c_in, c_out, BatchAsTimeLIF(), bias=True)
