"""What a family calls its tensors."""

from __future__ import annotations

from typing import NamedTuple


class Names(NamedTuple):
    """A family's modules by what they are, as Transformers names them; `.weight` and `.bias` are added.

    Names of a layer's parts come after `layer`, in which {} is its number. `qkv` and `gate_up` hold one name where the
    projections are packed. `experts` is the module that holds all experts' matrices (`gate_up_proj`, `down_proj`, no
    suffix); in files there is one matrix an expert, and `expert_files` names gate, up and down of expert {}.
    `renamed`: pieces of names that files spell in another way, as (here, there).
    """

    embed: str = "model.embed_tokens"
    positions: str = "model.embed_positions"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}."
    attn_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    attn_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    router: str = "mlp.gate"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    experts: str = "mlp.experts"
    expert_files: tuple[str, str, str] = (
        "mlp.experts.{}.gate_proj",
        "mlp.experts.{}.up_proj",
        "mlp.experts.{}.down_proj",
    )
    down: str = "mlp.down_proj"
    mlp_post_norm: str = "post_feedforward_layernorm"
    renamed: tuple[tuple[str, str], ...] = ()

    def in_files(self, name: str) -> tuple[str, ...]:
        """What a checkpoint's files may call the tensor `name`, the likeliest first."""
        spelled = [name]
        for here, there in self.renamed:
            spelled += [each.replace(here, there) for each in spelled if here in each]
        return tuple(dict.fromkeys(spelled))


LLAMA = Names()
