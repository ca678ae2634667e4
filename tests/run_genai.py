"""Greedy tokens by the real onnxruntime-genai, in its own environment.

In: a folder with genai_config.json, JSON of prompts (ids), the number of new tokens. Out: JSON of the new ids of each
prompt, without the end id, on stdout.
"""

import json
import sys

import numpy as np
import onnxruntime_genai


def main(folder: str, prompts: str, num_tokens: str) -> None:
    model = onnxruntime_genai.Model(folder)
    answers = []
    for ids in json.loads(prompts):
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(ids) + int(num_tokens))
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(np.array(ids, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        answers.append([int(token) for token in generator.get_sequence(0)[len(ids) :]])
    print(json.dumps(answers))  # noqa: T201 - its result


if __name__ == "__main__":
    main(*sys.argv[1:])
