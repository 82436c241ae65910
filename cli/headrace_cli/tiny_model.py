"""Writes a small Llama model with a byte-level tokenizer, for machines that can reach no model hub.

Its text means nothing; it serves to prove that KV arrives unchanged. So the same directory comes out of each run, and
the weights are drawn wide: with the usual small ones every prompt gets the same answer, and a hand-off that lost the
prompt's KV would still look right. The model answers in printable ASCII and never ends a text by itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SEED = 20
HIDDEN = 256
LAYERS = 3
HEADS = 4
KV_HEADS = 4
MLP = 704
MAX_POSITIONS = 4096

BOS, EOS = "<|begin|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

PRINTABLE = range(0x21, 0x7F)
"""Bytes that the model can answer with, so that two answers are equal as text only when they are equal as tokens."""

ATTENTION_GAIN = 2.0  # sharp enough that a single token far back changes the answer


def make_tiny_model(directory: Path) -> None:
    """Writes config, weights (safetensors, float32, about 2.5 million) and tokenizer into `directory`.

    Args:
        directory: made if it is missing; files of these names in it are replaced.

    Raises:
        OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory)
    _write_model(directory)


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `tiny-model DIR` to the command line."""
    command = subparsers.add_parser(
        "tiny-model", help="write a tiny Llama model (fixed seed) for tests and for machines without a model hub"
    )
    _add_arguments(command)
    command.set_defaults(run=_run)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write the model; made if missing")


def _run(arguments: argparse.Namespace) -> int:
    make_tiny_model(arguments.directory)
    print(f"wrote a tiny model to {arguments.directory}")
    return 0


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - the command line starts fast
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    vocabulary = {token: number for number, token in enumerate([BOS, EOS, *_letters()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, model_max_length=MAX_POSITIONS
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def _letters() -> list[str]:
    """The 256 letters that stand for the bytes; a printable byte but the space stands for itself."""
    from tokenizers import pre_tokenizers  # noqa: PLC0415

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _write_model(directory: Path) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415

    save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "vocab_size": 2 + len(_letters()),
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}) + "\n")


def _weights() -> dict[str, torch.Tensor]:
    import torch  # noqa: PLC0415

    letters = _letters()
    vocabulary = 2 + len(letters)

    generator = torch.Generator().manual_seed(SEED)

    def normal(rows: int, columns: int, gain: float) -> torch.Tensor:
        # A gain of 1 keeps the size of a normalised input: standard deviation 1 / sqrt(inputs).
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    output = torch.randn(vocabulary, HIDDEN, generator=generator)
    for token, letter in enumerate(["", "", *letters]):
        if letter == "" or ord(letter) not in PRINTABLE:
            output[token] = 0  # a logit of zero never wins against the best of the others

    weights = {
        "model.embed_tokens.weight": torch.randn(vocabulary, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": output,
    }
    kv_size = KV_HEADS * (HIDDEN // HEADS)
    for number in range(LAYERS):
        layer = f"model.layers.{number}."
        weights |= {
            layer + "input_layernorm.weight": torch.ones(HIDDEN),
            layer + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            layer + "self_attn.q_proj.weight": normal(HIDDEN, HIDDEN, ATTENTION_GAIN),
            layer + "self_attn.k_proj.weight": normal(kv_size, HIDDEN, ATTENTION_GAIN),
            layer + "self_attn.v_proj.weight": normal(kv_size, HIDDEN, 2.0),
            layer + "self_attn.o_proj.weight": normal(HIDDEN, HIDDEN, 2.0),
            layer + "mlp.gate_proj.weight": normal(MLP, HIDDEN, 1.0),
            layer + "mlp.up_proj.weight": normal(MLP, HIDDEN, 1.0),
            layer + "mlp.down_proj.weight": normal(HIDDEN, MLP, 1.0),
        }
    return weights


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    _add_arguments(parser)
    raise SystemExit(_run(parser.parse_args()))
