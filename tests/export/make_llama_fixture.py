"""Writes `llama_fixture/`, a small Llama and what Hugging Face's own forward pass makes of some ids.

    pip install torch transformers safetensors
    python tests/export/make_llama_fixture.py

Neither package is among the project's: the files are committed, and this program is run by hand.
"""

from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

DIRECTORY = Path(__file__).parent / "llama_fixture"


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        # Another one than this package's own width, 128.
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        # Two query heads share each.
        num_key_value_heads=2,
        # Wider than hidden_size / num_attention_heads.
        head_dim=8,
        max_position_embeddings=64,
        # Another one than 10,000, and small enough that all frequencies tell 24 positions apart.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        # Large enough to be seen in the logits.
        rms_norm_eps=3e-3,
        bos_token_id=60,
        eos_token_id=60,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Ten times the usual: attention that is sharp tells positions apart.
            mean, deviation = (1.0, 0.3) if "norm" in name else (0.0, 0.2)
            parameter.normal_(mean, deviation)
        ids = torch.randint(0, config.vocab_size, (2, 24))
        logits = model(ids).logits
    model.save_pretrained(DIRECTORY)
    (DIRECTORY / "generation_config.json").unlink(missing_ok=True)
    save_file({"ids": ids.to(torch.int32), "logits": logits.contiguous()}, DIRECTORY / "expected.safetensors")


if __name__ == "__main__":
    main()
