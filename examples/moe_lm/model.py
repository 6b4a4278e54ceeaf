"""A decoder-only byte-level transformer whose feed-forward layers are `moe_ext.MoELayer`.

Shape suffixes: B sequences, S bytes in a sequence, D model, H heads, C channels of a head,
V vocabulary, E experts, L MoE layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import moe_ext

ROPE_BASE = 10000.0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes that must be equal for a checkpoint to fit a model."""

    vocab_size: int = 256
    model_dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    ffn_dim: int = 256
    num_experts: int = 8
    top_k: int = 2
    moe_every: int = 1
    seq_len: int = 256

    def __post_init__(self) -> None:
        """Refuse sizes that cannot make a model, naming the option."""
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"expected --{name.replace('_', '-')} to be positive, got {value}")
        if self.model_dim % (2 * self.num_heads):
            raise ValueError(
                f"expected --model-dim to be a multiple of twice --num-heads {self.num_heads} "
                f"(rotary pairs), got {self.model_dim}"
            )
        if self.top_k > self.num_experts:
            raise ValueError(
                f"expected --top-k to be at most --num-experts {self.num_experts}, got {self.top_k}"
            )


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_attention(q_BHSC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor) -> Tensor:
    """Each position attends to itself and those before it."""
    return F.scaled_dot_product_attention(q_BHSC, k_BHSC, v_BHSC, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv_proj = nn.Linear(config.model_dim, 3 * config.model_dim, bias=False)
        self.o_proj = nn.Linear(config.model_dim, config.model_dim, bias=False)
        num_pairs = config.model_dim // config.num_heads // 2
        frequency = ROPE_BASE ** (-torch.arange(num_pairs) / num_pairs)
        angle_SC = torch.arange(config.seq_len)[:, None] * frequency
        self.register_buffer("cos_SC", angle_SC.cos(), persistent=False)
        self.register_buffer("sin_SC", angle_SC.sin(), persistent=False)

    def _rotate(self, x_BHSC: Tensor, ids_S: Tensor) -> Tensor:
        cos_SC = self.cos_SC[ids_S].to(x_BHSC.dtype)
        sin_SC = self.sin_SC[ids_S].to(x_BHSC.dtype)
        real, imag = x_BHSC.chunk(2, dim=-1)  # channel c turns with channel c + C/2
        return torch.cat([real * cos_SC - imag * sin_SC, real * sin_SC + imag * cos_SC], dim=-1)

    def forward(
        self, x_BSD: Tensor, ids_S: Tensor | None = None, attend: Attend = causal_attention
    ) -> Tensor:
        """Return the attention output, [B, S, D].

        `ids_S` are the positions that the rotation takes, 0 to S - 1 by default; `attend` mixes
        the values, where that is not causal attention over the S positions alone.
        """
        if ids_S is None:
            ids_S = torch.arange(x_BSD.shape[1], device=x_BSD.device)
        qkv = self.qkv_proj(x_BSD).unflatten(-1, (3, self.num_heads, -1))
        q_BHSC, k_BHSC, v_BHSC = qkv.permute(2, 0, 3, 1, 4)
        mixed_BHSC = attend(self._rotate(q_BHSC, ids_S), self._rotate(k_BHSC, ids_S), v_BHSC)
        return self.o_proj(mixed_BHSC.transpose(1, 2).flatten(2))


class DenseFFN(nn.Module):
    """SwiGLU with as many active parameters as the MoE layers around it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        ffn_dim = config.ffn_dim * config.top_k
        self.gate_up_proj = nn.Linear(config.model_dim, 2 * ffn_dim, bias=False)
        self.down_proj = nn.Linear(ffn_dim, config.model_dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the layer output, [B, S, D]."""
        gate, up = self.gate_up_proj(x_BSD).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.model_dim, eps=1e-6)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.model_dim, eps=1e-6)
        self.ffn = ffn

    def forward(self, x_BSD: Tensor, *context: object) -> Tensor:
        """Return the residual stream after this block, [B, S, D]; the context is attention's."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), *context)
        return x_BSD + self.ffn(self.ffn_norm(x_BSD))


class LanguageModel(nn.Module):
    """Next-byte model; `make_ffn(i)` is the feed-forward layer of block i."""

    def __init__(self, config: ModelConfig, make_ffn: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.model_dim)
        self.blocks = nn.ModuleList(Block(config, make_ffn(i)) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.model_dim, eps=1e-6)
        self.head = nn.Linear(config.model_dim, config.vocab_size, bias=False)

    def forward(self, x: Tensor, *context: object, stage: range | None = None) -> Tensor:
        """Return logits, [B, S, V], of bytes [B, S].

        The context is what `Attention` takes besides its input. The stage is those of the blocks to
        run: before the last one what comes out, [B, S, D], is what the next one goes on with.
        """
        last = len(self.blocks) - 1
        stage = range(last + 1) if stage is None else stage
        if 0 in stage:
            x = self.embedding(x)
        for i in stage:
            x = self.blocks[i](x, *context)
        return self.head(self.norm(x)) if last in stage else x

    def keep(self, stages: list[range]) -> None:
        """Drop the parts that other ranks of a pipeline hold."""
        kept = {i for stage in stages for i in stage}
        for i in set(range(len(self.blocks))) - kept:
            self.blocks[i] = nn.Identity()
        if 0 not in kept:
            self.embedding = nn.Identity()
        if len(self.blocks) - 1 not in kept:
            self.norm, self.head = nn.Identity(), nn.Identity()


class MoELanguageModel(LanguageModel):
    """Every `moe_every`-th block has experts, counted from the last block."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        ep_group: dist.ProcessGroup | None,
        balance_loss_coef: float,
        z_loss_coef: float,
        capacity_factor: float | None,
        **options: Any,
    ) -> None:
        def make_ffn(block: int) -> nn.Module:
            if (config.num_layers - 1 - block) % config.moe_every:
                return DenseFFN(config)
            return moe_ext.MoELayer(
                config.model_dim,
                config.ffn_dim,
                config.num_experts,
                config.top_k,
                balance=moe_ext.nn.Balance(coef=balance_loss_coef, z_coef=z_loss_coef),
                capacity=capacity_factor,
                ep_group=ep_group,
                **options,
            )

        super().__init__(config, make_ffn)

    def moe_layers(self) -> list[moe_ext.MoELayer]:
        """Return the MoE layers held here, from first to last."""
        return [layer for layer in self.modules() if isinstance(layer, moe_ext.MoELayer)]


def _generator(*key: object) -> torch.Generator:
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _std(name: str, shape: torch.Size, num_layers: int) -> float:
    if name.startswith("head"):
        return 0.02  # near-uniform predictions at the start
    if name.startswith("embedding"):
        return 0.5
    std = shape[-1] ** -0.5
    # Two additions to the residual stream per block: keep its variance independent of depth.
    return std * (2 * num_layers) ** -0.5 if "o_proj" in name or "down_proj" in name else std


@torch.no_grad()
def init_weights(model: LanguageModel, seed: int) -> None:
    """Draw every weight from a generator of its own, named by its place in the whole model.

    So the model is the same on any number of ranks: expert e has the same weights wherever it
    lives.
    """
    places = moe_ext.distributed.placements(model)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            continue  # norms start at one
        if name not in places:
            std = _std(name, parameter.shape, model.config.num_layers)
            parameter.copy_(torch.randn(parameter.shape, generator=_generator(seed, name)) * std)
            continue
        # Over ranks it is a DTensor, whose module takes a second to import.
        place, own = places[name], getattr(parameter, "to_local", None)
        part = parameter if own is None else own()
        std = _std(name, parameter.shape, model.config.num_layers)
        for expert, weight in zip(place.held, part, strict=True):
            generator = _generator(seed, name, expert)
            whole = torch.randn(parameter.shape[1:], generator=generator) * std
            if whole.shape != weight.shape:  # one of several ranks with shards of each expert
                whole = place.shard(whole[None])[0]
            weight.copy_(whole)


def count_parameters(model: MoELanguageModel) -> tuple[int, int]:
    """Return the parameters of the whole model and those that one token uses."""
    total = sum(parameter.numel() for parameter in model.parameters())
    active = float(total)
    for _, parameter, _, num_experts in moe_ext.distributed.expert_parameters(model):
        active -= parameter.numel() * (1 - model.config.top_k / num_experts)
    return total, round(active)


@torch.no_grad()
def sample(
    model: Callable[[Tensor], Tensor],
    prompt: bytes,
    *,
    num_bytes: int,
    seed: int,
    temperature: float,
    seq_len: int,
    device: torch.device,
) -> bytes:
    """Continue `prompt`; every rank must call this, since experts on all ranks are needed.

    Rank 0 draws the next byte and sends it to the others, so that all forward the same text.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(list(prompt), dtype=torch.long)
    for _ in range(num_bytes):
        window_BS = tokens[-seq_len:].to(device)[None]
        logits_V = model(window_BS)[0, -1].float().cpu()
        probability_V = torch.softmax(logits_V / temperature, dim=-1)
        next_token = torch.multinomial(probability_V, 1, generator=generator).to(device)
        dist.broadcast(next_token, src=0)
        tokens = torch.cat([tokens, next_token.cpu()])
    return bytes(tokens.tolist())
