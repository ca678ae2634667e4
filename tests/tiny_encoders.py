"""Tiny Hugging Face encoders for tests: random transformers models, and folders as sentence-transformers writes them.

In: a model type and changes to its config. Out: models whose attention is far from uniform, folders with a trained
WordPiece tokenizer. Nothing is fetched; everything is seeded.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tiny_tokenizers import LINES
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    BertConfig,
    CamembertConfig,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    MPNetConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}

_ROBERTA = {"type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 66}
_NO_SPECIAL = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
_DISTILBERT = {"dim": 48, "hidden_dim": 40, "n_layers": 2, "n_heads": 3}

CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bert": (BertConfig, {}),
    "roberta": (RobertaConfig, _ROBERTA),
    "xlm-roberta": (XLMRobertaConfig, _ROBERTA),
    "camembert": (CamembertConfig, _ROBERTA),
    "distilbert": (DistilBertConfig, _DISTILBERT),
    "electra": (ElectraConfig, {"embedding_size": 20}),
    "mpnet": (MPNetConfig, {"pad_token_id": 1, "max_position_embeddings": 66}),
    "modernbert": (ModernBertConfig, {"num_hidden_layers": 4, "local_attention": 8, **_NO_SPECIAL}),
}

TEXTS = ("The capital of France is Paris.", "", "tokens", "Hello, world! How are you today?", "Größe, naïve café")


def make_encoder(model_type: str, *, seed: int = 0, **changes: Any) -> Any:
    """A random fp32 model in eval mode: sharp attention, norms away from 1, biases not zero."""
    config_class, fixed = CONFIGS[model_type]
    sizes = {key: value for key, value in SIZES.items() if key in config_class().to_dict()}
    config = config_class(**(sizes | fixed | changes))
    config._attn_implementation = "eager"
    return randomise(AutoModel.from_config(config).eval(), seed=seed)


def randomise(model: Any, *, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                is_sharp = any(part in name for part in ("query", "key", "q_lin", "k_lin", ".q.", ".k."))
                parameter.copy_(noise * (2.5 if is_sharp else 1.0) * parameter.shape[-1] ** -0.5)
            if "relative" in name or "Wqkv" in name:
                parameter.mul_(3.0)
    return model


def word_piece() -> Tokenizer:
    """BERT's tokenizer, [CLS] and [SEP] around a text, with the truncation and padding that some files ask for."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=SIZES["vocab_size"], special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    ends = [(text, tokenizer.token_to_id(text)) for text in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=6)
    return tokenizer


def save_sentence_folder(
    folder: Path, model: Any, *, mode: str = "mean_tokens", normalize: bool = True, limit: int | None = 32
) -> Path:
    """`model`, a tokenizer and the files that state pooling, normalisation and the longest text."""
    model.save_pretrained(folder)
    word_piece().save(str(folder / "tokenizer.json"))
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": model.config.hidden_size, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling | {f"pooling_mode_{mode}": True}))
    if limit is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit, "do_lower_case": False}))
    return folder


def reference_states(model: Any, ids: list[int]) -> torch.Tensor:
    """Hidden states [S, W] of the transformers model for one text alone."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).last_hidden_state[0]
