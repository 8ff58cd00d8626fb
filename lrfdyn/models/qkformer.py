"""QKFormer (Zhou et al., 2024), ImageNet and CIFAR form. Two stages of Q-K token attention, then any attention."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from lrfdyn.attention import AttentionHost, lif_host
from lrfdyn.errors import require, unknown_name
from lrfdyn.models.base import SpikingModel, classifier
from lrfdyn.models.registry import register_model
from lrfdyn.models.spikformer import Block
from lrfdyn.models.transformer import TransformerConfig, stem_widths
from lrfdyn.nn.layers import ConvBN, SpikingConv, drop_path_rates, init_weights, max_pool, run_stages
from lrfdyn.nn.neurons import LIF
from lrfdyn.nn.sections import Section, lean_max_pool, sections_of


@dataclass(frozen=True)
class Form:
    """A layout of the network: which 3x3 convolutions pool (the first one, then those of each stage's embedding), and
    the number of token attention blocks in stages 1 and 2."""

    stem_pools: bool
    embedding_pools: tuple[tuple[bool, ...], ...]
    token_blocks: tuple[int, int]

    def strides(self) -> list[int]:
        """The strides of the three stages."""
        strides = [2 if self.stem_pools else 1]
        for pools in self.embedding_pools:
            strides.append(strides[-1] * 2 ** sum(pools))
        return strides[1:]


FORMS = {
    "imagenet": Form(True, ((True, False), (True, False), (True, False)), (1, 2)),
    "cifar": Form(False, ((False,), (False, True), (False, True)), (1, 1)),
}


class PooledConv(SpikingConv):
    """SN{pool(BN(Conv3x3(x)))}: the max pool comes before the neuron."""

    def __init__(self, c_in: int, c_out: int, pool: bool) -> None:
        super().__init__(c_in, c_out, LIF(), kernel=3)
        self.pool = pool

    def forward(self, x: Tensor, residual: Tensor | None = None, pool: bool = False) -> Tensor:
        if not self.pool:
            return super().forward(x, residual, pool)
        spikes = self.neuron(max_pool(ConvBN.forward(self, x)))
        return spikes if residual is None else residual + spikes

    def section(self, name: str, pool: bool = False) -> Section:
        """This layer as a section of spikes."""

        def currents(x: Tensor) -> Tensor:
            y = ConvBN.forward(self, x)
            return lean_max_pool(y) if self.pool else y

        section = ConvBN.section(self, name, self.pool)
        return replace(section, run=self, holds="bits", halves=(currents, self.neuron))


class Embedding(nn.Module):
    """Spiking convolutions to a stage's width and grid, with a spiking 1x1 convolution as their shortcut."""

    def __init__(self, c_in: int, c_out: int, pools: Sequence[bool]) -> None:
        super().__init__()
        widths = pairwise([c_in, *[c_out] * len(pools)])
        self.convs = nn.Sequential(*(PooledConv(a, b, pool) for (a, b), pool in zip(widths, pools, strict=True)))
        self.shortcut = SpikingConv(c_in, c_out, LIF(), stride=2 ** sum(pools))

    def forward(self, x: Tensor) -> Tensor:
        return self.convs(x) + self.shortcut(x)

    def sections(self, name: str) -> Iterator[Section]:
        """The embedding is one section."""
        halo, stride = 0, 1
        convs: Any = self.convs
        for conv in (layer.section(name) for layer in convs):
            halo, stride = halo + stride * conv.halo, stride * conv.stride
        yield Section(name, self, (self,), self.shortcut.conv.out_channels, "integers", halo, stride)


class TokenAttention(nn.Module):
    """Q-K token attention on `[T, B, dim, H, W]`: SN{sum of q over a head's channels} is a gate per head and token on
    k."""

    mixes_tokens = False

    def __init__(self, dim: int, heads: int, host: AttentionHost) -> None:
        super().__init__()
        self.heads = heads
        self.q = host.project(dim, dim)
        self.k = host.project(dim, dim)
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


def _stage_keys(stage: int) -> tuple[tuple[str, str], ...]:
    ours = f"stages.{stage - 1}"
    first, second = (1, 2) if stage == 1 else (3, 4)
    return (
        (rf"^patch_embed{stage}\.proj{first}_(conv|bn)\.", rf"{ours}.embedding.convs.0.\1."),
        (rf"^patch_embed{stage}\.proj{second}_(conv|bn)\.", rf"{ours}.embedding.convs.1.\1."),
        (rf"^patch_embed{stage}\.proj_res_(conv|bn)\.", rf"{ours}.embedding.shortcut.\1."),
        (rf"^stage{stage}\.(\d+)\.(?:tssa|attn|ssa)\.(q|k|v|proj)_(conv|bn)\.", rf"{ours}.blocks.\1.attn.\2.\3."),
        (rf"^stage{stage}\.(\d+)\.mlp\.(?:fc|mlp)([12])_(conv|bn)\.", rf"{ours}.blocks.\1.mlp.fc\2.\3."),
    )


@dataclass
class QKFormerConfig(TransformerConfig):
    """The options of QKFormer; `attention` is that of stage 3."""

    dim: int = 512
    """Channels of stage 3; stages 1 and 2 have a quarter and a half of them."""
    depth: int = 10
    """Number of blocks in all stages together."""
    form: str = "imagenet"
    """Layout of the network, "imagenet" or "cifar"."""
    legacy_neuron_axis: bool = False
    """In the official code the neuron behind the self-attention's projection runs over the T * B images instead of T
    steps, so that the output for an image depends on the batch around it. True does the same; official weights were
    trained that way."""


@register_model("qkformer_10_384", dim=384, depth=10, heads=6)
@register_model("qkformer_10_512", dim=512, depth=10, heads=8)
@register_model("qkformer_10_768", dim=768, depth=10, heads=12)
@register_model("qkformer_4_384", dim=384, depth=4, heads=8, form="cifar", image_size=32, num_classes=100)
class QKFormer(SpikingModel):
    """QKFormer: images `[B, C, H, W]` or `[T, B, C, H, W]` to logits `[B, classes]`. Options are the fields of
    `QKFormerConfig`."""

    config_class = QKFormerConfig
    official_keys = (
        (r"^patch_embed1\.proj_(conv|bn)\.", r"stem.\1."),
        *_stage_keys(1),
        *_stage_keys(2),
        *_stage_keys(3),
    )

    def __init__(self, **options: Any) -> None:
        config = QKFormerConfig(**options)
        super().__init__(config)
        heads = config.heads
        stem_width, *widths = stem_widths(config.dim)
        if config.form not in FORMS:
            raise unknown_name("form", config.form, FORMS)
        layout = FORMS[config.form]
        require(widths[0] % heads == 0, f"heads: expected a divisor of stage 1's width {widths[0]}, got {heads}")
        depths = [*layout.token_blocks, config.depth - sum(layout.token_blocks)]
        least = sum(layout.token_blocks) + 1
        require(depths[-1] >= 1, f"depth: expected an integer >= {least} in this form, got {config.depth}")
        self.describe_stages(widths, layout.strides(), config.image_size)
        host = lif_host()
        stage3_host = replace(host, project_out=_legacy_project_out) if config.legacy_neuron_axis else host
        rates = iter(drop_path_rates(config.drop_path, config.depth))

        def block(stage: int) -> Block:
            width, token = widths[stage], stage < 2
            attn = TokenAttention(width, heads, host) if token else config.make_attention(width, self.grid, stage3_host)
            return Block(attn, width, config.hidden_width(width), next(rates))

        self.stem = PooledConv(config.in_channels, stem_width, layout.stem_pools)
        self.stages = nn.ModuleList()
        for i, (c_in, c_out) in enumerate(pairwise([stem_width, *widths])):
            embedding = Embedding(c_in, c_out, layout.embedding_pools[i])
            blocks = nn.Sequential(*(block(i) for _ in range(depths[i])))
            self.stages.append(nn.Sequential(OrderedDict(embedding=embedding, blocks=blocks)))
        self.head = classifier(config.dim, config.num_classes)
        init_weights(self)

    def official_warning(self) -> str | None:
        if self.config["legacy_neuron_axis"]:
            return None
        return (
            "official QKFormer weights were trained with a neuron that runs over the batch; this model does not have "
            "it: build the model with legacy_neuron_axis=True to compute what the official code does"
        )

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        return run_stages(self.stages, self.stem(x), only_last)

    def head_input(self, x: Tensor) -> Tensor:
        # Channels moved last, so that the gradient of the mean is laid out like x.
        return x.permute(0, 1, 3, 4, 2).mean((0, 2, 3))

    def sections(self) -> Iterator[Section]:
        yield self.stem.section("stem")
        stages: Any = self.stages
        for i, stage in enumerate(stages):
            yield from stage.embedding.sections(f"stages.{i}.embedding")
            yield from sections_of(f"stages.{i}.blocks", stage.blocks)


def _legacy_project_out(c_in: int, c_out: int) -> nn.Module:
    return SpikingConv(c_in, c_out, BatchAsTimeLIF(), bias=True)
