"""Answers of the real optimum on ONNX Runtime, in its own environment.

In: "tokens", a folder, JSON of prompts (ids), the number of new tokens; "states", a folder, JSON of texts (ids); or
"texts", a folder, JSON of texts. Out: JSON on stdout: the new greedy ids of each prompt, each text's hidden states
[tokens][width] of one batch padded behind, or the ids of each text by the folder's tokenizer.
"""

import json
import sys
from typing import Any

import torch
from optimum.onnxruntime import ORTModelForCausalLM, ORTModelForFeatureExtraction
from transformers import AutoTokenizer

GRAPH = "optimum_model.onnx"


def tokens(folder: str, prompts: str, num_tokens: str) -> list[list[int]]:
    model = ORTModelForCausalLM.from_pretrained(folder, file_name=GRAPH)
    answers = []
    for ids in json.loads(prompts):
        found = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=int(num_tokens),
            do_sample=False,
        )
        answers.append(found[0, len(ids) :].tolist())
    return answers


def states(folder: str, texts: str) -> list[Any]:
    rows = json.loads(texts)
    model = ORTModelForFeatureExtraction.from_pretrained(folder, file_name=GRAPH)
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    found = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return [found[index, : len(row)].tolist() for index, row in enumerate(rows)]


def texts(folder: str, given: str) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text)["input_ids"] for text in json.loads(given)]


if __name__ == "__main__":
    what = {"tokens": tokens, "states": states, "texts": texts}[sys.argv[1]]
    print(json.dumps(what(*sys.argv[2:])))  # noqa: T201 - its result
