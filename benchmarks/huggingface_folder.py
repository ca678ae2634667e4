"""A .gguf file as a Hugging Face folder in float32, by transformers: python huggingface_folder.py MODEL.gguf FOLDER

For peers that read no GGUF; runs in their environment (torch, transformers, gguf) and fetches nothing.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"


def main(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = {"gguf_file": source.name}
    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, **file, dtype=torch.float32)
    # transformers 5 saves no model that still has the quantiser it was read with
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, **file).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
